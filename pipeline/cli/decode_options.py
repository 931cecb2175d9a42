"""Options that say how files become pages."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pipeline.encode.records import DecodeOptions
    from pipeline.pages import PageRanges

Command = Callable[..., Any]


class PageRangesType(click.ParamType):
    """`1-3,7,9-`: pages from 1; an open range goes to the end."""

    name = "ranges"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> PageRanges:
        """The ranges in a text; a UsageError of click for what is none."""
        from pipeline.pages import PageRanges

        if isinstance(value, PageRanges):
            return value
        ranges = []
        for part in str(value).split(","):
            found = re.fullmatch(r"\s*([1-9]\d{0,8})\s*(-\s*([1-9]\d{0,8})?)?\s*", part, re.A)
            first = int(found[1]) if found else 0
            last = (int(found[3]) if found[3] else None) if found and found[2] else first
            if not first or (last is not None and last < first):
                self.fail(f"{value!r} is no list of pages such as 1-3,7,9-", param, ctx)
            ranges.append((first, last))
        return PageRanges(tuple(ranges))


def decode_options(command: Command) -> Command:
    """--dpi, --password and --allow-truncated, handed on as one `decode`."""

    @functools.wraps(command)
    def collected(*arguments: Any, **values: Any) -> Any:
        return command(*arguments, decode=decode_of(values), **values)

    return bare_decode_options(collected)


def decode_of(values: dict[str, Any]) -> DecodeOptions:
    """What the options mean; takes them out of the values of all options."""
    from pipeline.encode.records import DecodeOptions

    return DecodeOptions(
        dpi=values.pop("dpi"),
        pages=values.pop("page_ranges", None),
        passwords=values.pop("passwords"),
        allow_truncated=values.pop("allow_truncated"),
    )


def bare_decode_options(command: Command) -> Command:
    """The same options, each handed on as it was given."""
    decorators = (
        click.option(
            "--dpi",
            type=click.IntRange(min=1, max=2400),
            metavar="N",
            help="Resolution at which PDF pages are rendered.  [default: the model's own size]",
        ),
        click.option(
            "--password",
            "passwords",
            multiple=True,
            envvar="PIPELINE_PASSWORD",
            metavar="TEXT",
            help="Tried on encrypted documents; may be repeated.  [env: PIPELINE_PASSWORD]",
        ),
        click.option(
            "--allow-truncated",
            is_flag=True,
            help="Take what is left of a page whose file is cut off; results say so.",
        ),
    )
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


def page_ranges_option(command: Command) -> Command:
    """--pages; stands above `decode_options`."""
    return click.option(
        "--pages",
        "page_ranges",
        type=PageRangesType(),
        metavar="RANGES",
        help="Only these pages of each document, such as 1-3,7,9-.",
    )(command)
