"""From paths to pages: find files, tell their type by content, decode to RGB.

A page comes out whole and the right way round, or as a Failure; never partly decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.errors import Failure, Reason, Stage
from pipeline.keys import RenderSpec
from pipeline.pages.find import discover
from pipeline.pages.images import count_frames, image_pages
from pipeline.pages.pdf import count_pdf_pages, pdf_pages
from pipeline.pages.records import (
    DEFAULT_DPI,
    MAX_PAGE_PIXELS,
    RULES,
    Decoded,
    Discovery,
    Page,
    PageRanges,
    Refused,
    SourceFile,
    Wanted,
)
from pipeline.pages.sources import at_hand

__all__ = [
    "DEFAULT_DPI",
    "DEFAULT_RENDER",
    "MAX_PAGE_PIXELS",
    "RULES",
    "Discovery",
    "Page",
    "PageRanges",
    "SourceFile",
    "Wanted",
    "count_pages",
    "decode_pages",
    "discover",
]

DEFAULT_RENDER = RenderSpec(RULES, DEFAULT_DPI)


def decode_pages(
    file: SourceFile,
    render: RenderSpec = DEFAULT_RENDER,
    *,
    only: Wanted | None = None,
    passwords: Sequence[str] = (),
) -> Iterator[Page | Failure]:
    """The pages of a file in order; with `only`, just these numbers.

    Decoded in this process, one page in memory at a time; `pipeline.pages.decoders` does it in
    others. A page that can't be decoded is a Failure and the next one follows; a file that can't
    be opened is a single Failure with page None. Numbers in a set `only` that the file does not
    have give `no_such_page` each, at the end. `passwords` are tried on encrypted documents.
    """
    count = 0
    try:
        with at_hand(file) as found:
            for number, outcome in (
                pdf_pages(found, render, only, passwords)
                if file.kind == "pdf"
                else image_pages(found, only, render.allow_truncated)
            ):
                count = number
                if outcome is not None:
                    yield _as_page(file, number, outcome)
    except Refused as refused:
        yield refused.as_failure(file.path, None)
        return
    for number in sorted(only) if isinstance(only, frozenset) else ():
        if not 1 <= number <= count:
            detail = f"the file has {count} page{'s' if count != 1 else ''}"
            yield Failure(str(file.path), number, Stage.DECODE, Reason.NO_SUCH_PAGE, detail)


def count_pages(file: SourceFile) -> int:
    """How many pages the file announces, none decoded; 1 where it can't be told."""
    if not file.paged:
        return 1
    try:
        with at_hand(file) as found:
            return count_pdf_pages(found) if file.kind == "pdf" else count_frames(found)
    except Refused:
        return 1


def _as_page(file: SourceFile, number: int, outcome: Decoded | Refused) -> Page | Failure:
    if isinstance(outcome, Refused):
        return outcome.as_failure(file.path, number)
    return Page(file, number, outcome.rgb, outcome.partial)
