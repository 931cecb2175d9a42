"""`pipeline encode`: pages in, cache entries (and a job file) out.

A rerun that finds everything in the cache ends here, before anything heavy is imported.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli import options
from pipeline.cli.decode_options import bare_decode_options, page_ranges_option
from pipeline.cli.job_options import job_options
from pipeline.memo import Memo, memo_path
from pipeline.models import BUNDLED_PATH
from pipeline.rerun import AllCached, all_cached, recall_target

if TYPE_CHECKING:
    from pipeline.store import Location

# what a rerun is not looked for with: it may mean other pages, or asks for more than counts
_NOT_PLAIN = ("files_from", "revision", "page_ranges", "job", "prompt", "schema", "max_failures")


@click.command()
@options.input_options
@options.model_options
@options.cache_option
@options.pixel_options
@page_ranges_option
@bare_decode_options
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    help="Threads of the vision tower.  [default: one per physical core]",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1, max=1),
    default=1,
    metavar="1",
    help="Processes that encode: one. For more, start the command again; they split the pages.",
)
@click.option(
    "--compression",
    type=click.Choice(["zstd", "none"]),
    default="zstd",
    show_default=True,
    help="How entries are stored, without loss either way; `none` is quicker and takes more room.",
)
@click.option(
    "--max-failures",
    metavar="N|PERCENT",
    help="Stop once more pages than N, or than PERCENT of at least 20, have failed.",
)
@click.option("--rehash", is_flag=True, help="Read every file again, whatever is remembered of it.")
@job_options
@options.output_options
def encode(
    paths: tuple[Path, ...],
    cache: Location,
    rehash: bool,
    as_json: bool,
    quiet: bool,
    **values: Any,
) -> None:
    """Put the embeddings of page images into the cache.

    PATH is an image, a PDF, a directory that is searched for them, or a pattern in quotes. Pages
    that are in the cache are not encoded again. A page that fails is named and the rest goes on
    (exit code 3), up to --max-failures (exit code 4).

    \b
    Example:
      pipeline encode docs/
      pipeline encode "scans/**/*.tif" --max-failures 5%
      find scans/ -mtime -1 -print0 | pipeline encode --files-from -
      pipeline encode scans/ --job jobs/scans.jsonl --prompt "Read the page."
    """
    with Memo(memo_path(), distrust=rehash) as memo:
        started = time.monotonic()
        if (known := _rerun(memo, paths, cache, quiet, values)) is not None:
            _show(known, time.monotonic() - started, as_json, quiet)
            return
        from pipeline.cli.encoding import encode_and_report

        encode_and_report(memo, paths, cache=cache, as_json=as_json, quiet=quiet, **values)


def _rerun(
    memo: Memo, paths: tuple[Path, ...], cache: Location, quiet: bool, values: dict[str, Any]
) -> AllCached | None:
    """What there is, if all of it is known and in the cache."""
    model = values["model"]
    directory = BUNDLED_PATH if model is None else Path(model)
    plain = not any(values[name] for name in _NOT_PLAIN)
    if not (plain and paths and isinstance(cache, Path) and all(map(os.path.exists, paths))):
        return None
    target = recall_target(memo, directory, target_options(values))
    if target is None:
        return None
    from pipeline.store.disk import Disk
    from pipeline.store.history import note_look_ups
    from pipeline.store.hold import hold_shared
    from pipeline.store.layout import entry_name

    disk, tower = Disk(cache), target.tower_fingerprint
    with hold_shared(cache, say=lambda message: click.echo(message, err=True)):
        known = all_cached(
            paths, memo, target.subject, lambda key: disk.has(entry_name(tower, key))
        )
    if known is not None:
        note_look_ups(cache, "encode", pages=known.pages, cached=known.pages, encoded=0, failed=0)
        options.say_model(model, quiet)
        for warning in () if quiet else target.warnings:
            options.say_warning(directory.resolve().name, warning)
    return known


def target_options(values: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that decide what pages are encoded for."""
    names = ("min_pixels", "max_pixels", "precision", "dpi", "allow_truncated")
    return {name: values[name] for name in names}


def _show(known: AllCached, seconds: float, as_json: bool, quiet: bool) -> None:
    record: dict[str, Any] = {
        "pages": known.pages,
        "encoded": 0,
        "cached": known.pages,
        "failed": 0,
    }
    record |= {"skipped": known.skipped, "seconds": round(seconds, 3), "megapixels": 0.0}
    record |= {"tokens": 0, "bytes": 0}
    if as_json:
        click.echo(json.dumps(record | {"failures": [], "stopped": False}))
    elif not quiet:
        click.echo(options.encode_summary(record))
