"""`pipeline golden`: record answers and embeddings, check them again before an upgrade."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli import options
from pipeline.cli.decode_options import decode_options
from pipeline.cli.engine_options import engine_options, engine_options_of, require_engine
from pipeline.cli.job_options import text_of
from pipeline.errors import ExitCode

if TYPE_CHECKING:
    from pipeline.golden import GoldenOptions, GoldenReport


@click.group()
def golden() -> None:
    """Record a golden set, and check it before an upgrade.

    A golden set holds pages, a prompt, the answers to it and the pages' embeddings. After an
    upgrade of vLLM, of transformers or of the checkpoint, `check` encodes and asks again.

    \b
    Example:
      pipeline golden record docs/ --out golden/
      pipeline golden check golden/
    """


@golden.command()
@click.argument(
    "paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH..."
)
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="The golden set; must not be there yet.",
)
@click.option(
    "--prompt",
    default="Read the page.",
    show_default=True,
    metavar="TEXT|FILE",
    help="What is asked of each page.",
)
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, metavar="N",
    help="Longest answer.",
)  # fmt: skip
@options.model_options
@options.pixel_options
@decode_options
@engine_options
@options.output_options
def record(
    paths: tuple[Path, ...], out: Path, prompt: str, max_tokens: int, as_json: bool, **values: Any
) -> None:
    """Record the answers to each page of PATH, and its embedding.

    \b
    Example:
      pipeline golden record docs/ --out golden/
    """
    from pipeline import golden as sets
    from pipeline.parity.questions import Asking

    made = sets.record(_options(out, values), paths, Asking(text_of(prompt), max_tokens))
    if as_json:
        click.echo(json.dumps(made.as_record()))
    else:
        click.echo(f"recorded {len(made.pages)} pages, {made.requests} answers in {out}")


@golden.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False), metavar="DIR")
@options.model_options
@engine_options
@options.output_options
def check(directory: Path, as_json: bool, **values: Any) -> None:
    """Encode and ask again, and compare with the golden set in DIR.

    Pixel settings and dtype are those of the recording. Exit code 7 if an answer or an embedding
    differs.

    \b
    Example:
      pipeline golden check golden/ --model models/qwen3-vl-8b-new
    """
    from pipeline import golden as sets

    report = sets.check(_options(directory, values))
    if as_json:
        click.echo(json.dumps(report.as_record()))
    else:
        _show(report)
    raise SystemExit(int(ExitCode.OK if report.good else ExitCode.DIFFERENT))


def _options(directory: Path, values: dict[str, Any]) -> GoldenOptions:
    from pipeline.golden import GoldenOptions
    from pipeline.run import PageOptions

    quiet = values.pop("quiet")
    options.say_model(values["model"], quiet)
    require_engine(values["model"], values["revision"], quiet=quiet)
    engine = engine_options_of(values)
    return GoldenOptions(directory, PageOptions(cache=directory, **values), engine, quiet)


def _show(report: GoldenReport) -> None:
    found = report.as_record()
    click.echo(f"{found['identical']} of {found['requests']} answers as recorded")
    for each in found["different"]:
        click.echo(
            f"{each['custom_id']}: token {each['position']}, margin {each['margin']:.2g}: "
            f"recorded {each['golden']!r}, now {each['now']!r}"
        )
    for page in report.pages:
        if not page.good:
            what = "can't be compared" if page.cosine is None else f"cosine {page.cosine:.6f}"
            click.echo(f"{options.printable(page.file)} page {page.page}: embedding {what}")
    if found["cosine_min"] is not None:
        click.echo(f"lowest cosine of a row to the recorded one: {found['cosine_min']:.7f}")
    for name, now in report.now.items():
        if now != report.then.get(name):
            click.echo(f"{name}: {report.then.get(name)} when recorded, now {now}")
