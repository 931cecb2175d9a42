"""What `pipeline encode` does where there may be something to encode."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from pipeline.checkpoint import Model, resolve_model
from pipeline.cli import options
from pipeline.cli.advice import HINTS, failure_line
from pipeline.cli.decode_options import decode_of
from pipeline.cli.encode import target_options
from pipeline.cli.job_options import JobPlan, job_plan
from pipeline.encode import EncodeReport, FailureLimit, Outcome, Target, encode_pages, target_for
from pipeline.encode.machine import choose_precision, physical_cores
from pipeline.encode.records import Done
from pipeline.encode.remember import subject_of
from pipeline.errors import ExitCode
from pipeline.memo import Memo
from pipeline.pages import Discovery
from pipeline.pages.decoders import Decoders
from pipeline.rerun import KnownTarget, note_target
from pipeline.store import Compression, Location
from pipeline.store.history import note_look_ups


def encode_and_report(
    memo: Memo,
    paths: tuple[Path, ...],
    files_from: Path | None,
    model: str | None,
    revision: str | None,
    cache: Location,
    min_pixels: int | None,
    max_pixels: int | None,
    precision: str,
    threads: int | None,
    workers: int,
    compression: str,
    max_failures: str | None,
    as_json: bool,
    quiet: bool,
    **values: Any,
) -> None:
    """Encode, write the job, report, and leave with the exit code."""
    chosen = target_options(
        values | {"min_pixels": min_pixels, "max_pixels": max_pixels, "precision": precision}
    )
    decode = decode_of(values)
    # one thread keeps one decoder from working, several keep two busy at most
    decode = replace(decode, processes=min(decode.processes, threads or physical_cores()))
    inputs = options.inputs_of(paths, files_from)
    limit = None if max_failures is None else FailureLimit.parse(max_failures)
    plan = job_plan(**values)
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
        memo=memo,
    )
    _note_target(memo, found, chosen, target)
    watch = _silent if quiet else partial(_progress, tower=_tower_line(precision, threads))
    say = partial(click.echo, err=True)
    report = encode_pages(
        inputs.paths, target, watch=watch, threads=threads, limit=limit, memo=memo, say=say
    )
    stopped = limit is not None and limit.exceeded(report.pages, report.failed)
    if plan is not None and not stopped:  # a part would pass for the whole
        lines = plan.write(report, inputs.roots, found.name)
        if not (quiet or as_json):
            click.echo(
                f"job: {options.printable(str(plan.path))}, {options.counted(lines, 'line')}"
            )
    note_look_ups(
        cache,
        "encode",
        pages=report.pages,
        cached=report.cached,
        encoded=report.encoded,
        failed=report.failed,
    )
    _show(report, stopped, as_json, quiet)
    if stopped:
        click.echo(_stop_line(report, max_failures, plan), err=True)
        raise SystemExit(int(ExitCode.STOPPED))
    raise SystemExit(int(ExitCode.SOME_FAILED if report.failed else ExitCode.OK))


def _note_target(memo: Memo, model: Model, chosen: dict[str, Any], target: Target) -> None:
    """Remember what a rerun needs to know of the model; one of the hub may have moved by then."""
    if model.repo is None:
        warnings = tuple(target.family.warnings(model))
        known = KnownTarget(subject_of(target), target.store.tower_fingerprint, warnings)
        note_target(memo, model.path, chosen, known)


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
        click.echo(options.encode_summary(report.as_record()))
