"""What `pipeline run` says at its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli import options
from pipeline.cli.advice import failure_line
from pipeline.errors import ExitCode

if TYPE_CHECKING:
    from pipeline.run import RunReport

_FAILURES_SHOWN = 20
_WHY_STOPPED = {"time": "time is up", "signal": "stopped by a signal", "limit": "limit reached"}


def show_report(job: Path, report: RunReport, *, as_json: bool, quiet: bool) -> None:
    """The totals on standard output, failures and what is left on standard error."""
    for failure in report.failures[:_FAILURES_SHOWN]:
        click.echo(failure_line(failure), err=True)
    if len(report.failures) > _FAILURES_SHOWN:
        click.echo(f"… and {len(report.failures) - _FAILURES_SHOWN} more in errors.jsonl", err=True)
    if as_json:
        click.echo(json.dumps(report.as_record()))
    elif not quiet:
        click.echo(_totals(job, report))
    if report.stopped:
        click.echo(
            f"{_WHY_STOPPED[report.stopped]}, {report.expired} left: "
            "the same command goes on from here",
            err=True,
        )


def exit_code(report: RunReport) -> ExitCode:
    """STOPPED if something is left, SOME_FAILED if a request has no answer that is of use."""
    from pipeline.run.quality import DEFECTS

    if report.stopped:
        return ExitCode.STOPPED
    bad = report.failed or any(name in report.flagged for name in DEFECTS)
    return ExitCode.SOME_FAILED if bad else ExitCode.OK


def _totals(job: Path, report: RunReport) -> str:
    from pipeline.run import run_directory_of

    flagged = ", ".join(f"{count} {name}" for name, count in report.flagged.items())
    return (
        f"{options.counted(report.requests, 'request')}: {report.succeeded} succeeded, "
        f"{report.reused} reused, {report.failed} failed; "
        f"{options.counted(report.completion_tokens, 'token')} written, "
        f"{options.counted(report.engine_starts, 'engine start')}, {report.seconds:.1f} s\n"
        + (f"flagged answers: {flagged}\n" if flagged else "")
        + f"answers: {options.printable(str(run_directory_of(job) / 'results.jsonl'))}"
    )
