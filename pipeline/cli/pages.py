"""`pipeline pages`: what would be encoded, without a model run."""

from __future__ import annotations

import json
from pathlib import Path

import click

from pipeline.checkpoint import resolve_model
from pipeline.cli import options
from pipeline.cli.decode_options import decode_options, page_ranges_option
from pipeline.encode import DecodeOptions
from pipeline.encode.listing import PageLine, list_pages
from pipeline.errors import ExitCode
from pipeline.families import family_of


@click.command()
@options.input_options
@options.model_options
@options.pixel_options
@page_ranges_option
@decode_options
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def pages(
    paths: tuple[Path, ...],
    files_from: Path | None,
    model: str | None,
    revision: str | None,
    min_pixels: int | None,
    max_pixels: int | None,
    decode: DecodeOptions,
    precision: str,
    as_json: bool,
) -> None:
    """List the pages that would be encoded, with their sizes and tokens.

    PATH is an image, a PDF, a directory that is searched for them, or a pattern in quotes.
    Every page is decoded, none is encoded; of the model only the config files are read.

    \b
    Example:
      pipeline pages docs/
      find scans/ -mtime -1 -print0 | pipeline pages --files-from -
      pipeline pages scans/ --max-pixels 1000000 --json
    """
    inputs = options.inputs_of(paths, files_from)
    options.say_model(model, quiet=False)
    found = resolve_model(model, revision)
    spec = family_of(found).encode_spec(
        found, min_pixels=min_pixels, max_pixels=max_pixels, precision=precision
    )
    listed = list_pages(inputs.paths, spec.geometry, decode)
    if as_json:
        click.echo(json.dumps(listed.as_record()))
    else:
        for page in listed.pages:
            click.echo(_row(page))
        click.echo(
            f"{options.counted(len(listed.pages), 'page')}, "
            f"{options.counted(listed.skipped, 'file')} skipped"
        )
    failed = any(page.reason for page in listed.pages)
    raise SystemExit(int(ExitCode.SOME_FAILED if failed else ExitCode.OK))


def _row(page: PageLine) -> str:
    number = "" if page.page is None else f"#{page.page}"
    name = options.printable(page.file + number)
    if page.reason is not None:
        return f"{name}: {page.reason}: {page.detail}"
    return (
        f"{name}: {page.width_px} x {page.height_px} px, at the model "
        f"{page.model_width_px} x {page.model_height_px} px, "
        f"{options.counted(page.tokens or 0, 'token')}{', cut off' if page.partial else ''}"
    )
