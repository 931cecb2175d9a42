"""Options that several commands share, as decorators."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.amounts import ByteSize
from pipeline.errors import UsageError

if TYPE_CHECKING:
    from pipeline.checkpoint import Model
    from pipeline.pages.inputs import Inputs
    from pipeline.store.location import Location

Command = Callable[..., Any]


def input_options(command: Command) -> Command:
    """PATH... and --files-from; `inputs_of` makes one of both."""
    command = click.option(
        "--files-from",
        type=click.Path(path_type=Path, allow_dash=True),
        metavar="FILE|-",
        help="Also take the paths listed in FILE, one a line or separated by NUL; - is stdin.",
    )(command)
    return click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="[PATH]...")(
        command
    )


def inputs_of(paths: tuple[Path, ...], files_from: Path | None) -> Inputs:
    """What PATH... and --files-from name; raises UsageError."""
    from pipeline.pages.inputs import gather_inputs, names_in

    if files_from is None and not paths:
        raise UsageError("nothing to read", "name a file or a directory, or give `--files-from`")
    return gather_inputs(paths, [] if files_from is None else names_in(_list_bytes(files_from)))


def _list_bytes(files_from: Path) -> bytes:
    try:
        with click.open_file(os.fspath(files_from), "rb") as stream:
            data: bytes = stream.read()
        return data
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no stdin
        why = (isinstance(error, OSError) and error.strerror) or error
        message = f"can't read the list `{printable(str(files_from))}`: {why}"
        raise UsageError(message, "name a file of paths, or - for standard input") from error


def model_options(command: Command) -> Command:
    """--model and --revision."""
    command = click.option(
        "--revision", metavar="COMMIT", help="Commit, tag or branch of a hub model."
    )(command)
    return click.option(
        "--model",
        metavar="DIR|ID",
        help="Model directory or hub id.  [default: the bundled tiny-reader]",
    )(command)


class CachePlace(click.ParamType):
    """A directory, or a URL that fsspec opens."""

    name = "DIR|URL"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Location:
        """Where the cache lies; a UsageError of click for what is no such place."""
        from pipeline.store.location import location_of

        found = location_of(value)
        if isinstance(found, Path):
            click.Path(file_okay=False).convert(found, param, ctx)
        return found


def cache_option(command: Command) -> Command:
    """--cache, --cache-local and --cache-local-bytes, handed on as one `cache`."""

    @functools.wraps(command)
    def collected(
        *arguments: Any,
        cache: Location,
        cache_local: Path | None,
        cache_local_bytes: int | None,
        **values: Any,
    ) -> Any:
        from pipeline.store.location import with_tier

        cache = with_tier(cache, cache_local, cache_local_bytes)
        return command(*arguments, cache=cache, **values)

    decorators = (
        click.option(
            "--cache",
            type=CachePlace(),
            default=Path("cache"),
            metavar="DIR|URL",
            help="Where embeddings are kept: a directory, or as s3://bucket/prefix.  "
            "[default: cache/]",
        ),
        click.option(
            "--cache-local",
            type=click.Path(path_type=Path, file_okay=False),
            metavar="DIR",
            help="Keep here what was read from a cache elsewhere.",
        ),
        click.option(
            "--cache-local-bytes",
            type=ByteSize(),
            metavar="SIZE",
            help="How much --cache-local may take, as 200GB; the least recently used goes first.",
        ),
    )
    for decorate in reversed(decorators):
        collected = decorate(collected)
    return collected


def pixel_options(command: Command) -> Command:
    """--min-pixels, --max-pixels and --precision: what decides an embedding's bytes."""
    decorators = (
        click.option(
            "--min-pixels",
            type=click.IntRange(min=1),
            metavar="N",
            help="Smaller pages are enlarged to N pixels.  [default: the model's own]",
        ),
        click.option(
            "--max-pixels",
            type=click.IntRange(min=1),
            metavar="N",
            help="Larger pages are reduced to N pixels.  [default: the model's own]",
        ),
        click.option(
            "--precision",
            type=click.Choice(["auto", "float32"]),
            default="auto",
            show_default=True,
            help="Arithmetic of the vision tower; auto takes an exact one.",
        ),
    )
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


def place_options(command: Command) -> Command:
    """--base and --root: where a job's images may lie."""
    command = click.option(
        "--root",
        "roots",
        multiple=True,
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        metavar="DIR",
        help="Images must lie below here; may be repeated.  [default: of the job, and the current]",
    )(command)
    return click.option(
        "--base",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        metavar="DIR",
        help="Where relative image paths start.  [default: the job file's directory]",
    )(command)


def output_options(command: Command) -> Command:
    """--json and --quiet."""
    command = click.option("--quiet", "-q", is_flag=True, help="No progress, no summary.")(command)
    return click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")(
        command
    )


def say_model(model: str | None, quiet: bool) -> None:
    """One line on stderr where the embedded model stands in for one that was not named."""
    if model is None and not quiet:
        click.echo("model: bundled tiny-reader", err=True)


def say_warnings(model: Model, quiet: bool) -> None:
    """What is odd about a checkpoint, a line each on stderr; raises CheckpointError."""
    from pipeline.families import family_of

    for warning in () if quiet else family_of(model).warnings(model):
        say_warning(model.name, warning)


def say_warning(name: str, warning: str) -> None:
    """One line about a model on stderr."""
    click.echo(f"warning: `{name}`: {warning}", err=True)


def encode_summary(record: dict[str, Any]) -> str:
    """An encode report as a line for people."""
    return (
        f"{counted(record['pages'], 'page')}: {record['encoded']} encoded, "
        f"{record['cached']} cached, {record['failed']} failed; "
        f"{counted(record['skipped'], 'file')} skipped; "
        f"{record['seconds']:.1f} s, {record['megapixels']:.2f} megapixels, "
        f"{record['tokens']} tokens, {record['bytes'] / 1e6:.2f} MB"
    )


def counted(count: int, noun: str) -> str:
    """`1 page`, `2 pages`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def printable(name: str) -> str:
    """A file name on one line that any terminal takes."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in name
    )
