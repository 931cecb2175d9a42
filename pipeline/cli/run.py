"""`pipeline run`: a job file in, answers out."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from pipeline.cli import options
from pipeline.cli.advice import failure_line
from pipeline.cli.decode_options import decode_options
from pipeline.cli.engine_options import (
    driver_option,
    engine_options,
    engine_options_of,
    require_engine,
)
from pipeline.errors import ExitCode

_FAILURES_SHOWN = 20


@click.command()
@click.argument("job", type=click.Path(path_type=Path, dir_okay=False))
@driver_option
@options.model_options
@options.cache_option
@options.pixel_options
@decode_options
@options.place_options
@click.option("--served-name", metavar="NAME", help="Name of the model in the job and answers.")
@click.option("--no-encode", is_flag=True, help="Refuse pages that are not in the cache.")
@click.option("--strict", is_flag=True, help="Refuse the whole job if a line is bad.")
@engine_options
@options.output_options
def run(job: Path, as_json: bool, quiet: bool, **values: Any) -> None:
    """Run a job through vLLM on cached embeddings, its vision tower not loaded.

    JOB is a file of OpenAI batch lines. Answers are appended to JOB's .run directory as they
    finish: results.jsonl, errors.jsonl, report.json. The same command again does exactly what
    is left; answers whose request has not changed are kept.

    \b
    Example:
      pipeline run jobs/nightly.jsonl
      pipeline run jobs/nightly.jsonl --engine run-batch --json
    """
    from pipeline.run import PageOptions, RunOptions, run_directory_of, run_job

    options.say_model(values["model"], quiet)
    engine = engine_options_of(values)
    pages = PageOptions(**{name: values.pop(name) for name in PageOptions.__dataclass_fields__})
    require_engine(pages.model, pages.revision, quiet=quiet)
    signal.signal(signal.SIGTERM, _stop)
    report = run_job(
        RunOptions(
            job=job,
            pages=pages,
            engine=engine,
            encode=not values.pop("no_encode"),
            quiet=quiet,
            **values,
        )
    )
    for failure in report.failures[:_FAILURES_SHOWN]:
        click.echo(failure_line(failure), err=True)
    if len(report.failures) > _FAILURES_SHOWN:
        click.echo(f"… and {len(report.failures) - _FAILURES_SHOWN} more in errors.jsonl", err=True)
    if as_json:
        click.echo(json.dumps(report.as_record()))
    elif not quiet:
        click.echo(
            f"{options.counted(report.requests, 'request')}: {report.succeeded} succeeded, "
            f"{report.reused} reused, {report.failed} failed; "
            f"{options.counted(report.completion_tokens, 'token')} written, "
            f"{options.counted(report.engine_starts, 'engine start')}, {report.seconds:.1f} s\n"
            f"answers: {options.printable(str(run_directory_of(job) / 'results.jsonl'))}"
        )
    if report.stopped:
        left = report.requests - report.succeeded - report.reused - report.failed
        click.echo(f"stopped early, {left} left: the same command goes on from here", err=True)
    raise SystemExit(int(_exit_code(report.stopped, report.failed)))


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _exit_code(stopped: bool, failed: int) -> ExitCode:
    if stopped:
        return ExitCode.STOPPED
    return ExitCode.SOME_FAILED if failed else ExitCode.OK
