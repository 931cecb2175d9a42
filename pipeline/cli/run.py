"""`pipeline run`: a job file in, answers out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipeline.cli import options
from pipeline.cli.choice_options import choice_of, choice_options
from pipeline.cli.decode_options import decode_options
from pipeline.cli.engine_options import (
    driver_option,
    engine_options,
    engine_options_of,
    replicas_option,
    require_engine,
)
from pipeline.cli.run_shown import exit_code, show_report


@click.command()
@click.argument("job", type=click.Path(path_type=Path, dir_okay=False))
@driver_option
@replicas_option
@options.model_options
@options.cache_option
@options.pixel_options
@decode_options
@options.place_options
@click.option("--served-name", metavar="NAME", help="Name of the model in the job and answers.")
@click.option("--no-encode", is_flag=True, help="Refuse pages that are not in the cache.")
@click.option("--strict", is_flag=True, help="Refuse the whole job if a line is bad.")
@choice_options
@engine_options
@options.output_options
def run(job: Path, as_json: bool, quiet: bool, **values: Any) -> None:
    """Run a job through vLLM on cached embeddings, its vision tower not loaded.

    JOB is a file of OpenAI batch lines. Answers are appended to JOB's .run directory as they
    finish: results.jsonl, errors.jsonl, report.json. The same command again does exactly what
    is left; answers whose request has not changed are kept. What failed for good is not tried
    again without --retry-failed.

    \b
    Example:
      pipeline run jobs/nightly.jsonl
      pipeline run jobs/nightly.jsonl --until 06:00 --json
      pipeline run jobs/nightly.jsonl --engine run-batch
    """
    from pipeline.run import PageOptions, RunOptions, run_job

    options.say_model(values["model"], quiet)
    chosen = choice_of(values)
    engine = engine_options_of(values)
    pages = PageOptions(**{name: values.pop(name) for name in PageOptions.__dataclass_fields__})
    require_engine(pages.model, pages.revision, quiet=quiet)
    report = run_job(
        RunOptions(
            job=job,
            pages=pages,
            engine=engine,
            encode=not values.pop("no_encode"),
            quiet=quiet,
            **chosen,
            **values,
        )
    )
    show_report(job, report, as_json=as_json, quiet=quiet)
    raise SystemExit(int(exit_code(report)))
