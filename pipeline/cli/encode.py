"""`pipeline encode`: pages in, cache entries (and a job file) out."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

from pipeline.checkpoint import resolve_model
from pipeline.cli import options
from pipeline.cli.advice import HINTS
from pipeline.cli.decode_options import decode_options, page_ranges_option
from pipeline.cli.job_options import JobPlan, job_options, job_plan
from pipeline.encode import (
    DecodeOptions,
    EncodeReport,
    FailureLimit,
    Outcome,
    encode_pages,
    target_for,
)
from pipeline.encode.machine import choose_precision, physical_cores
from pipeline.encode.records import Done
from pipeline.errors import ExitCode, Failure
from pipeline.pages import Discovery
from pipeline.pages.decoders import Decoders
from pipeline.store import Compression, Location


@click.command()
@options.input_options
@options.model_options
@options.cache_option
@options.pixel_options
@page_ranges_option
@decode_options
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    help="Threads of the vision tower.  [default: one per physical core]",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Processes that encode, each with a vision tower of its own.",
)
@click.option(
    "--compression",
    type=click.Choice([each.value for each in Compression]),
    default=Compression.ZSTD.value,
    show_default=True,
    help="How entries are stored, without loss either way; `none` is quicker and takes more room.",
)
@click.option(
    "--max-failures",
    metavar="N|PERCENT",
    help="Stop once more pages than N, or than PERCENT of at least 20, have failed.",
)
@job_options
@options.output_options
def encode(
    paths: tuple[Path, ...],
    files_from: Path | None,
    model: str | None,
    revision: str | None,
    cache: Location,
    min_pixels: int | None,
    max_pixels: int | None,
    decode: DecodeOptions,
    precision: str,
    threads: int | None,
    workers: int,
    compression: str,
    max_failures: str | None,
    as_json: bool,
    quiet: bool,
    **job: Any,
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
    inputs = options.inputs_of(paths, files_from)
    limit = None if max_failures is None else FailureLimit.parse(max_failures)
    plan = job_plan(**job)
    options.say_model(model, quiet)
    found = resolve_model(model, revision)
    options.say_warnings(found, quiet)
    target = target_for(
        found,
        cache,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        decode=decode,
        precision=precision,
        compression=Compression(compression),
    )
    watch = _silent if quiet else partial(_progress, tower=_tower_line(precision, threads))
    say = partial(click.echo, err=True)
    report = encode_pages(inputs.paths, target, watch=watch, threads=threads, limit=limit, say=say)
    stopped = limit is not None and limit.exceeded(report.pages, report.failed)
    if plan is not None and not stopped:  # a part would pass for the whole
        lines = plan.write(report, inputs.roots, found.name)
        if not (quiet or as_json):
            click.echo(
                f"job: {options.printable(str(plan.path))}, {options.counted(lines, 'line')}"
            )
    _show(report, stopped, as_json, quiet)
    if stopped:
        click.echo(_stop_line(report, max_failures, plan), err=True)
        raise SystemExit(int(ExitCode.STOPPED))
    raise SystemExit(int(ExitCode.SOME_FAILED if report.failed else ExitCode.OK))


def _stop_line(report: EncodeReport, max_failures: str | None, plan: JobPlan | None) -> str:
    done = f"{report.failed} of {options.counted(report.pages, 'page')} failed"
    job_line = "" if plan is None else "; the job is not written"
    return f"stopped early: {done}, more than --max-failures {max_failures}{job_line}"


def _tower_line(precision: str, threads: int | None) -> str:
    """How the tower computes, and why."""
    choice = choose_precision(precision)
    count = threads or physical_cores()
    why = "asked for" if threads else "one per physical core"
    return f"tower: {choice.value} ({choice.reason}), {options.counted(count, 'thread')} ({why})"


def _silent(outcomes: Iterator[Outcome], found: Discovery) -> Iterator[Outcome]:
    return outcomes


def _progress(outcomes: Iterator[Outcome], found: Discovery, *, tower: str) -> Iterator[Outcome]:
    """The outcomes; once something is encoded, a line about the tower, on a terminal a bar."""
    bar: Any = None
    pixels, started = 0, 0.0
    for count, outcome in enumerate(outcomes, start=1):
        if bar is not None:
            pixels += _encoded_pixels(outcome)
            rate = pixels / 1e6 / (time.monotonic() - started)
            bar.set_postfix_str(f"{rate:.2f} megapixels/s", refresh=False)
            bar.update()
        elif _encoded_pixels(outcome):  # the rates leave out the first page: it loads the tower
            click.echo(tower, err=True)
            bar, started = _bar(found, count), time.monotonic()
        yield outcome
    if bar is not None:
        bar.close()


def _encoded_pixels(outcome: Outcome) -> int:
    if isinstance(outcome, Done) and outcome.stored_bytes is not None:
        return outcome.pixels
    return 0


def _bar(found: Discovery, done: int) -> Any:
    """A bar over all pages that the files announce, on stderr, shown on a terminal only."""
    from tqdm import tqdm

    with Decoders(1) as decoders:
        total = decoders.count(found.files)
    return tqdm(total=total, initial=done, unit=" pages", disable=None, dynamic_ncols=True)


def _show(report: EncodeReport, stopped: bool, as_json: bool, quiet: bool) -> None:
    for failure in report.failures:
        click.echo(failure_line(failure), err=True)
    for reason in sorted({failure.reason for failure in report.failures}):
        click.echo(f"hint: {reason.value}: {HINTS[reason]}", err=True)
    if as_json:
        click.echo(json.dumps(report.as_record() | {"stopped": stopped}))
    elif not quiet:
        click.echo(
            f"{options.counted(report.pages, 'page')}: {report.encoded} encoded, "
            f"{report.cached} cached, {report.failed} failed; "
            f"{options.counted(report.skipped, 'file')} skipped; "
            f"{report.seconds:.1f} s, {report.megapixels:.2f} megapixels, {report.tokens} tokens, "
            f"{report.bytes / 1e6:.2f} MB"
        )


def failure_line(failure: Failure) -> str:
    """A failure as one line: file, page, reason, detail."""
    page = "" if failure.page is None else f" page {failure.page}"
    detail = f": {failure.detail}" if failure.detail else ""
    return options.printable(
        f"failed: {failure.file}{page}: {failure.stage.value}/{failure.reason.value}{detail}"
    )
