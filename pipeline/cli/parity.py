"""`pipeline parity`: the proof that cached embeddings give the native path's answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from pipeline.cli import options
from pipeline.cli.advice import failure_line
from pipeline.cli.decode_options import decode_options
from pipeline.cli.engine_options import (
    engine_options,
    engine_options_of,
    require_engine,
)
from pipeline.cli.job_options import text_of
from pipeline.config import DRIVERS
from pipeline.errors import ExitCode, UsageError

SAMPLES = Path("docs")


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="[PATH]...")
@options.model_options
@options.cache_option
@options.pixel_options
@decode_options
@click.option(
    "--prompt",
    default="Read the page.",
    show_default=True,
    metavar="TEXT|FILE",
    help="What both are asked.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    metavar="N",
    help="Longest answer that is compared.",
)
@click.option(
    "--margin",
    type=click.FloatRange(min=0),
    default=1e-3,
    show_default=True,
    help="A difference is a tie, and no failure, below this gap of log-probabilities.",
)
@click.option(
    "--truth",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="File names and texts, tab-separated: also count right reads and misreads.",
)
@click.option(
    "--pages-per-request",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Besides each page alone, ask about N consecutive pages at once.",
)
@click.option(
    "--engine",
    "driver",
    type=click.Choice([*DRIVERS, "both"]),
    default=DRIVERS[0],
    show_default=True,
    help="How the cached side is asked; see `pipeline run --help`.",
)
@engine_options
@options.output_options
def parity(
    paths: tuple[Path, ...],
    prompt: str,
    max_tokens: int,
    margin: float,
    truth: Path | None,
    pages_per_request: int,
    driver: str,
    as_json: bool,
    quiet: bool,
    **values: Any,
) -> None:
    """Compare cached embeddings with native images, token by token.

    The pages of PATH (default: docs/) are answered twice, greedily: from images with the vision
    tower loaded, and from the cache with it absent. `--dtype float32` compares most strictly.
    Exit code 7 if an answer differs by more than a tie.

    \b
    Example:
      pipeline parity docs/ --dtype float32
    """
    from pipeline.parity import ParityOptions, compare
    from pipeline.run import PageOptions

    if not paths and not SAMPLES.is_dir():
        raise UsageError("there is no `docs/` here", "name pages: `pipeline parity PATH`")
    options.say_model(values["model"], quiet)
    require_engine(values["model"], values["revision"], quiet=quiet)
    engine = engine_options_of(values)
    pages = PageOptions(**{name: values[name] for name in PageOptions.__dataclass_fields__})
    report = compare(
        ParityOptions(
            paths=paths or (SAMPLES,),
            pages=pages,
            engine=engine,
            prompt=text_of(prompt),
            max_tokens=max_tokens,
            pages_per_request=pages_per_request,
            drivers=DRIVERS if driver == "both" else (driver,),
            quiet=quiet,
        )
    )
    record = report.as_record() | (
        {}
        if truth is None
        else _reads({name: answer.text for name, answer in report.answers.items()}, truth)
    )
    for failure in report.failures:
        click.echo(failure_line(failure), err=True)
    _show(record, as_json)
    if any(difference.margin >= margin for difference in report.different):
        raise SystemExit(int(ExitCode.DIFFERENT))
    raise SystemExit(int(ExitCode.SOME_FAILED if report.failures else ExitCode.OK))


def _show(record: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(record))
        return
    click.echo(f"{record['identical']} of {record['requests']} answers identical to the last token")
    for each in record["different"]:
        click.echo(
            f"{each['custom_id']}: token {each['position']}, margin {each['margin']:.2g}: "
            f"native {each['native']!r}, cached {each['cached']!r}"
        )
    if record["cosine_min"] is not None:
        click.echo(f"lowest cosine of a row to the reference tower: {record['cosine_min']:.7f}")
    if "right" in record:
        click.echo(f"{record['right']} pages read right, {record['misread']} misread")


def _reads(answers: dict[str, str], truth: Path) -> dict[str, int]:
    """Right reads and misreads among the pages that the truth file names."""
    texts = dict(
        line.split("\t", 1) for line in truth.read_text(encoding="utf-8").splitlines() if line
    )
    judged = [
        answer == texts[name].replace("\\n", "\n")
        for custom_id, answer in answers.items()
        if (name := custom_id.rsplit("/", 1)[-1]) in texts
    ]
    return {"right": sum(judged), "misread": len(judged) - sum(judged)}
