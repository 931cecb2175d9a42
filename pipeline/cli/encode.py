"""`pipeline encode`: pages in, cache entries (and a job file) out."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

from pipeline.checkpoint import resolve_model
from pipeline.cli import options
from pipeline.encode import EncodeReport, Outcome, encode_pages, target_for
from pipeline.encode.machine import choose_precision, physical_cores
from pipeline.encode.records import Done
from pipeline.errors import ExitCode, Failure, Reason, UsageError
from pipeline.keys import canonical_json
from pipeline.pages import Discovery, count_pages

_LIKE_A_FILE = re.compile(r"\S+\.(txt|md|prompt|jinja|j2)")
_HINTS = {
    Reason.NOT_FOUND: "check the name",
    Reason.UNREADABLE: "check that the file can be read and is not being written",
    Reason.CORRUPT: "the file is damaged or no page: fetch it again or leave it out",
    Reason.TRUNCATED: "the file is cut off: fetch it again",
    Reason.TOO_LARGE: "split the page or save it with fewer pixels (PDF: a lower `--dpi`)",
    Reason.ENCRYPTED: "remove the document's password first",
    Reason.UNSUPPORTED: "convert it to PNG, JPEG, TIFF, WebP or PDF",
    Reason.NO_SUCH_PAGE: "pages count from 1",
    Reason.ASPECT_RATIO: "cut the page into parts",
    Reason.NOT_FINITE: "check the model's vision weights",
    Reason.TOWER_ERROR: "try again; if it stays, lower `--max-pixels`",
}


@click.command()
@click.argument(
    "paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH..."
)
@options.model_options
@options.cache_option
@options.pixel_options
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    help="Threads of the vision tower.  [default: one per physical core]",
)
@click.option(
    "--job",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write the pages as a job file.",
)
@click.option("--prompt", metavar="TEXT|FILE", help="The job's prompt, or a file that holds it.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    metavar="N",
    help="The job's limit of tokens per answer.",
)
@click.option(
    "--schema",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="JSON schema that the job's answers must follow.",
)
@click.option(
    "--pages-per-request",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Consecutive pages of a file in one request of the job.",
)
@options.output_options
def encode(
    paths: tuple[Path, ...],
    model: str | None,
    revision: str | None,
    cache: Path,
    min_pixels: int | None,
    max_pixels: int | None,
    dpi: int,
    precision: str,
    threads: int | None,
    job: Path | None,
    prompt: str | None,
    max_tokens: int,
    schema: Path | None,
    pages_per_request: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Put the embeddings of page images into the cache.

    PATH is an image, a PDF, or a directory that is searched for them. Pages that are in the cache
    are not encoded again. A page that fails is named and the rest goes on (exit code 3).

    \b
    Example:
      pipeline encode docs/
      pipeline encode scans/ --job jobs/scans.jsonl --prompt "Read the page."
    """
    if job is not None:
        _check_job(job, prompt)
    elif prompt is not None or schema is not None:
        given = "--prompt" if schema is None else "--schema"
        raise UsageError(f"`{given}` belongs to a job", "add `--job FILE`, or leave it out")
    prompt = None if prompt is None else text_of(prompt)
    answer_schema = None if schema is None else _schema_of(schema)
    options.say_model(model, quiet)
    found = resolve_model(model, revision)
    options.say_warnings(found, quiet)
    target = target_for(
        found, cache, min_pixels=min_pixels, max_pixels=max_pixels, dpi=dpi, precision=precision
    )
    watch = _silent if quiet else partial(_progress, tower=_tower_line(precision, threads))
    report = encode_pages(paths, target, watch=watch, threads=threads)
    if job is not None and prompt is not None:
        lines = _write_job(
            job, report, paths, prompt, max_tokens, answer_schema, pages_per_request, found.name
        )
        if not (quiet or as_json):
            click.echo(f"job: {options.printable(str(job))}, {options.counted(lines, 'line')}")
    _show(report, as_json, quiet)
    raise SystemExit(int(ExitCode.SOME_FAILED if report.failed else ExitCode.OK))


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

    total = sum(map(count_pages, found.files))
    return tqdm(total=total, initial=done, unit=" pages", disable=None, dynamic_ncols=True)


def _check_job(job: Path, prompt: str | None) -> None:
    from pipeline.jobs import check_job_path

    if prompt is None:
        raise UsageError("`--job` needs a prompt", "add `--prompt TEXT` or `--prompt FILE`")
    check_job_path(job)


def _write_job(
    job: Path,
    report: EncodeReport,
    inputs: tuple[Path, ...],
    prompt: str,
    max_tokens: int,
    schema: dict[str, Any] | None,
    pages_per_request: int,
    model_name: str,
) -> int:
    """Write the job and return the number of its lines."""
    from pipeline.jobs import JobImage, write_job

    return write_job(
        job,
        (JobImage(page.path, page.page, page.paged) for page in report.good),
        inputs=list(inputs),
        prompt=prompt,
        max_tokens=max_tokens,
        schema=schema,
        pages_per_request=pages_per_request,
        model_name=model_name,
    )


def text_of(prompt: str) -> str:
    """The prompt itself, or the content of the file that it names.

    Raises UsageError for what looks like the name of a file and is none.
    """
    try:
        is_file = Path(prompt).is_file()
    except (OSError, ValueError):  # too long for a name: it is the prompt
        return prompt
    try:
        if is_file:
            return Path(prompt).read_text(encoding="utf-8-sig").strip()
        if _LIKE_A_FILE.fullmatch(prompt):
            raise UsageError(f"there is no prompt file `{prompt}`", "check the name")
        prompt.encode()  # what a command line can't decode comes as lone surrogates
    except (OSError, ValueError) as error:
        message = f"can't read the prompt `{prompt}`: {error}"
        raise UsageError(message, "it must be UTF-8") from error
    return prompt


def _schema_of(path: Path) -> dict[str, Any]:
    try:
        schema = json.loads(path.read_text(encoding="utf-8-sig"))
        canonical_json(schema)  # refuses what a job line can't hold: NaN, lone surrogates
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"can't read the schema `{path}`: {error}") from error
    if not isinstance(schema, dict):
        raise UsageError(f"the schema `{path}` is no JSON object")
    return schema


def _show(report: EncodeReport, as_json: bool, quiet: bool) -> None:
    for failure in report.failures:
        click.echo(failure_line(failure), err=True)
    for reason in sorted({failure.reason for failure in report.failures}):
        click.echo(f"hint: {reason.value}: {_HINTS[reason]}", err=True)
    if as_json:
        click.echo(json.dumps(report.as_record()))
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
