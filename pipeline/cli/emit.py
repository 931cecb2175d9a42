"""`pipeline emit`: a job file in, self-contained batch files out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from pipeline.cli import options
from pipeline.cli.advice import failure_line
from pipeline.cli.amounts import ByteSize
from pipeline.cli.decode_options import decode_options
from pipeline.errors import ExitCode


@click.command()
@click.argument("job", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where the files go: JOB-00001.jsonl and on.",
)
@click.option(
    "--shard-bytes",
    type=ByteSize(),
    default="180MB",
    show_default=True,
    metavar="SIZE",
    help="A file holds at most this much, or one request.",
)
@click.option("--native", is_flag=True, help="Page images at model size, not embeddings.")
@options.model_options
@options.cache_option
@options.pixel_options
@decode_options
@options.place_options
@click.option("--no-encode", is_flag=True, help="Leave out pages that are not in the cache.")
@options.output_options
def emit(job: Path, as_json: bool, quiet: bool, **values: Any) -> None:
    """Write a job with its embeddings inside, for another machine.

    JOB is a file of OpenAI batch lines. The files need no cache and no page images; vLLM's own
    batch runner takes them, with `--enable-mm-embeds`. A request that fails is named and left
    out (exit code 3).

    \b
    Example:
      pipeline emit jobs/nightly.jsonl --out carry/
      pipeline emit jobs/nightly.jsonl --out carry/ --native --shard-bytes 100MB
    """
    from pipeline.emit import EmitOptions, emit_job
    from pipeline.run.images import PageOptions

    options.say_model(values["model"], quiet)
    pages = PageOptions(**{name: values.pop(name) for name in PageOptions.__dataclass_fields__})
    encode = not values.pop("no_encode")
    report = emit_job(EmitOptions(job=job, pages=pages, encode=encode, quiet=quiet, **values))
    for failure in report.failures:
        click.echo(failure_line(failure), err=True)
    if as_json:
        click.echo(json.dumps(report.as_record()))
    elif not quiet:
        click.echo(
            f"{options.counted(report.requests, 'request')}: {report.written} written, "
            f"{report.failed} failed; {options.counted(len(report.shards), 'file')}, "
            f"{report.bytes / 1e6:.1f} MB, {report.seconds:.1f} s"
        )
    raise SystemExit(int(ExitCode.SOME_FAILED if report.failed else ExitCode.OK))
