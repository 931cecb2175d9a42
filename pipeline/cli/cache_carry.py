"""`pipeline cache export`, `import` and `path`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli import options
from pipeline.cli.amounts import entries, shown_size
from pipeline.cli.decode_options import decode_options
from pipeline.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from pipeline.needs import Whereabouts
    from pipeline.store.carry import Carried, Choice
    from pipeline.store.location import Location


@click.command()
@click.argument("archive", type=click.Path(path_type=Path, dir_okay=False))
@options.cache_option
@click.option("--tower", metavar="HEX", help="Only this tower's entries, by its fingerprint.")
@click.option(
    "--job",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="JOB",
    help="Only what this job needs.",
)
@options.model_options
@options.pixel_options
@decode_options
@options.place_options
@options.output_options
def export(
    archive: Path, tower: str | None, job: Path | None, as_json: bool, quiet: bool, **values: Any
) -> None:
    """Write entries into ARCHIVE, a tar, to carry them to another machine.

    All of them, those of one tower, or those of a job that is run with the given model and pixel
    options. What the cache knows of the documents goes along: there, nothing is decoded. Exit
    code 3 if an entry was bad or a page of the job is not in the cache.

    \b
    Example:
      pipeline cache export carry.tar
      pipeline cache export carry.tar --job jobs/nightly.jsonl
    """
    from pipeline.store.carry import everything, export_entries
    from pipeline.store.formats import require_cache

    root = values["cache"]
    _warn(require_cache(root))
    if tower is not None and job is not None:
        raise UsageError("`--tower` and `--job` exclude each other", "leave one out")
    missing: list[str] = []
    choice = everything(root, tower) if job is None else _of_job(job, values, quiet, missing)
    with _bar(quiet) as bar:
        carried = export_entries(root, archive, choice, bar.update)
    _show(carried, as_json, quiet, missing)
    raise SystemExit(int(ExitCode.SOME_FAILED if carried.problems or missing else ExitCode.OK))


def _of_job(job: Path, values: dict[str, Any], quiet: bool, missing: list[str]) -> Choice:
    """The entries and manifests of a job; its pages without an entry go to `missing`."""
    from pipeline.cli.advice import failure_line
    from pipeline.needs import needs_of
    from pipeline.run.images import PageOptions, open_pages
    from pipeline.store.carry import Choice
    from pipeline.store.layout import VERSION

    options.say_model(values["model"], quiet)
    pages = PageOptions(**{name: values[name] for name in PageOptions.__dataclass_fields__})
    opened = open_pages(pages)
    needs = needs_of([job], opened, values["base"], values["roots"])
    for failure in needs.failures:
        click.echo(failure_line(failure), err=True)
    missing += needs.missing
    store = opened.target.store
    entries = (store.name(key).removeprefix(f"{VERSION}/") for key in sorted(needs.keys))
    return Choice(entries, needs.manifests)


@click.command("import")
@click.argument("archive", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@options.cache_option
@options.output_options
def import_(archive: Path, cache: Location, as_json: bool, quiet: bool) -> None:
    """Put the entries of ARCHIVE into the cache, each checked; none is overwritten.

    Take archives only from whom you trust with your documents: what the cache knows of a document
    can't be checked without it. Exit code 3 if something in the archive was bad.

    \b
    Example:
      pipeline cache import carry.tar
    """
    from pipeline.store.carry import import_entries

    def say(message: str) -> None:
        click.echo(message, err=True)

    with _bar(quiet, archive.stat().st_size) as bar:
        carried = import_entries(cache, archive, bar.update, say)
    _show(carried, as_json, quiet, [])
    raise SystemExit(int(ExitCode.SOME_FAILED if carried.problems else ExitCode.OK))


@click.command()
@click.argument("page")
@options.cache_option
@options.model_options
@options.pixel_options
@decode_options
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
def path(page: str, as_json: bool, **values: Any) -> None:
    """Show where PAGE's entry lies or would lie, and what that follows from.

    PAGE is a file, or a page of one, as docs/report.pdf#page=2. Exit code 3 if it can't be
    encoded.

    \b
    Example:
      pipeline cache path docs/report.pdf#page=2
      pipeline cache path docs/invoice.png --json
    """
    from pipeline.cli.advice import failure_line
    from pipeline.errors import Failure
    from pipeline.needs import page_of, whereabouts
    from pipeline.run.images import PageOptions
    from pipeline.store.formats import refuse_newer

    _warn(refuse_newer(values["cache"]))
    options.say_model(values["model"], quiet=as_json)
    found = whereabouts(*page_of(page), PageOptions(**values).target())
    if isinstance(found, Failure):
        click.echo(failure_line(found), err=True)
        raise SystemExit(int(ExitCode.SOME_FAILED))
    if as_json:
        click.echo(json.dumps(found.as_record()))
    else:
        _show_whereabouts(found)


# ---------------------------------------------------------------- for people


def _warn(messages: tuple[str, ...]) -> None:
    for message in messages:
        click.echo(f"warning: {message}", err=True)


def _bar(quiet: bool, total_bytes: int | None = None) -> Any:
    """Bytes carried, on stderr, shown on a terminal only."""
    from tqdm import tqdm

    off = quiet or None  # None: shown on a terminal only
    return tqdm(total=total_bytes, unit="B", unit_scale=True, disable=off, dynamic_ncols=True)


def _show(carried: Carried, as_json: bool, quiet: bool, missing: list[str]) -> None:
    for problem in carried.problems:
        click.echo(options.printable(f"left out: {problem.path}: {problem.why}"), err=True)
    for name in missing:
        click.echo(options.printable(f"not in the cache: {name}"), err=True)
    if as_json:
        click.echo(json.dumps(carried.as_record() | {"missing": missing}))
    elif not quiet:
        click.echo(
            f"{entries(carried.entries)}, {shown_size(carried.bytes)}, and "
            f"{options.counted(carried.manifests, 'document')}; "
            f"{carried.there} there before, {len(carried.problems)} left out"
        )


def _show_whereabouts(found: Whereabouts) -> None:
    state = found.state
    if found.bytes is not None and found.last_use_s is not None:
        used = time.strftime("%Y-%m-%d", time.localtime(found.last_use_s))
        state += f", {shown_size(found.bytes)}, last used {used}"
    rows = [
        ("page", f"{found.file}, page {found.page}"),
        ("file", found.file_digest),
        ("document", found.manifest + ("" if found.manifest_there else " (not there)")),
        ("pixels", f"{found.pixels}, {found.width_px} x {found.height_px} px"),
        *((f"spec {name}", json.dumps(value)) for name, value in found.spec.items()),
        ("tower", found.tower),
        ("key", found.key),
        ("entry", found.path),
        ("state", state + (f": {found.why}" if found.why else "")),
    ]
    for label, text in rows:
        click.echo(options.printable(f"{label:<20} {text}"))
