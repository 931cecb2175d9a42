"""`pipeline results`: what a run has answered, for people and for tables."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from pipeline.cli import options
from pipeline.errors import ExitCode, UsageError

_ENDINGS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}
_STATES = ("ok", "flagged", "failed", "pending")


@click.command()
@click.argument("job", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where to write.  [default: standard output]",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "csv", "parquet"]),
    help="[default: by FILE's ending, else jsonl]",
)
@click.option(
    "--per",
    type=click.Choice(["request", "document"]),
    default="request",
    show_default=True,
    help="A row for each; a document's pages are joined.",
)
@click.option("--separator", default="\\n\\n", metavar="TEXT", help="Between a document's pages.")
@click.option("--json-columns", is_flag=True, help="Fields of JSON answers as columns.")
@click.option(
    "--status", "states", type=click.Choice(_STATES), multiple=True, help="Only these; repeatable."
)
@options.output_options
def results(
    job: Path,
    output: Path | None,
    form: str | None,
    per: str,
    separator: str,
    json_columns: bool,
    states: tuple[str, ...],
    as_json: bool,
    quiet: bool,
) -> None:
    """Write a job's answers in the order of the job.

    Each request of JOB gives one row, whatever became of it: its text, or why there is none.
    Works while a run goes on. Exit code 3 if an answer is missing or of no use.

    \b
    Example:
      pipeline results jobs/nightly.jsonl
      pipeline results jobs/nightly.jsonl -o pages.csv
      pipeline results jobs/invoices.jsonl -o invoices.parquet --json-columns
      pipeline results jobs/nightly.jsonl -o documents.jsonl --per document --json
    """
    from pipeline.results import document_rows, open_results, write_table

    form = form or _ENDINGS.get(output.suffix.lower() if output else "", "jsonl")
    _check(job, output, form, as_json=as_json, joined=per == "document" and json_columns)
    found = open_results(job)
    separator = separator.encode().decode("unicode_escape") if "\\" in separator else separator
    totals: Counter[str] = Counter({state: 0 for state in _STATES})

    def records() -> Iterator[dict[str, Any]]:
        totals.clear()
        rows = found.rows() if per == "request" else document_rows(found, separator)
        for row in rows:
            totals[row.status] += 1
            if not states or row.status in states:
                yield row.as_record()

    write_table(records, form, output or sys.stdout.buffer, fields=json_columns)
    sys.stdout.flush()
    counts = {state: totals[state] for state in _STATES}
    if as_json:
        click.echo(json.dumps({"rows": sum(counts.values()), **counts}))
    elif not quiet:
        click.echo(", ".join(f"{count} {state}" for state, count in counts.items()), err=True)
        if extra := found.without_line():
            click.echo(f"{extra} more in results.jsonl, whose lines left the job", err=True)
    bad = counts["flagged"] + counts["failed"] + counts["pending"]
    raise SystemExit(int(ExitCode.SOME_FAILED if bad else ExitCode.OK))


def _check(job: Path, output: Path | None, form: str, *, as_json: bool, joined: bool) -> None:
    if joined:
        raise UsageError("`--json-columns` are of one answer each", "leave out `--per document`")
    if output is None:
        if form == "parquet":
            raise UsageError("Parquet is written to a file", "add `--output FILE.parquet`")
        if as_json:
            raise UsageError("`--json` prints totals where the rows go", "add `--output FILE`")
        return
    from pipeline.run import run_directory_of

    place, inside = output.resolve(), run_directory_of(job).resolve()
    if place == job.resolve() or place.is_relative_to(inside):
        raise UsageError(
            f"`{output}` belongs to the job, and would be overwritten", "name another file"
        )
