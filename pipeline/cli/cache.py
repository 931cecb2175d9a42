"""`pipeline cache`: count, check, mend and shrink the embedding cache, carry it elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli import options
from pipeline.cli.amounts import Age, ByteSize, shown_size
from pipeline.cli.cache_carry import export, import_, path
from pipeline.cli.cache_shown import show_statistics, show_swept
from pipeline.cli.decode_options import decode_options
from pipeline.errors import ExitCode

if TYPE_CHECKING:
    from pipeline.store.location import Location
    from pipeline.store.logbook import Found

json_option = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
grace_option = click.option(
    "--grace",
    type=Age(),
    default="48h",
    show_default=True,
    metavar="AGE",
    help="In an object store, which has no locks: leave alone what was used or written since.",
)


def _state_option(help_text: str) -> Any:
    return click.option(
        "--state", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help=help_text
    )


@click.group()
def cache() -> None:
    """Look after the embedding cache.

    Everything in it can be made again, at the price of the CPU time that it took.

    \b
    Example:
      pipeline cache stats
      pipeline cache gc --max-bytes 500GB
    """


cache.add_command(export)
cache.add_command(import_)
cache.add_command(path)


@cache.command()
@options.cache_option
@click.option(
    "--max-bytes", type=ByteSize(), metavar="SIZE", help="Also tell what gc with it would delete."
)
@json_option
def stats(cache: Location, max_bytes: int | None, as_json: bool) -> None:
    """Count what the cache holds, by tower and by last use.

    \b
    Example:
      pipeline cache stats
      pipeline cache stats --max-bytes 500GB --json
    """
    from pipeline.store.census import statistics, take_census
    from pipeline.store.sweep import Budget, foresee

    _enter(cache)
    census = take_census(cache)
    found = statistics(census)
    swept = None if max_bytes is None else foresee(census, Budget(max_bytes))
    if as_json:
        would = None if swept is None else swept.as_record()
        click.echo(json.dumps(found.as_record() | {"gc": would}))
        return
    show_statistics(found)
    if swept is not None:
        show_swept(swept)


@cache.command()
@options.cache_option
@_state_option("Note progress and problems here; the same command goes on from there.")
@options.output_options
def verify(cache: Location, state: Path | None, as_json: bool, quiet: bool) -> None:
    """Read every entry and list what is wrong; nothing is changed.

    With --state, a verification that was stopped, however, goes on where it was; one that was
    finished begins anew. Exit code 3 if there is a problem.

    \b
    Example:
      pipeline cache verify
      pipeline cache verify --state verify.state --json
    """
    from tqdm import tqdm

    from pipeline.store import logbook as logbooks

    _enter(cache)
    logbook = logbooks.Logbook(cache, state)
    on_terminal = sys.stderr.isatty() and not quiet

    def say(problem: Found) -> None:
        if not as_json:
            line = options.printable(f"problem: {problem.path}: {problem.why}")
            tqdm.write(line, file=sys.stdout)

    with tqdm(
        total=logbooks.total_bytes(cache) if on_terminal else None,
        initial=logbook.progress.bytes,
        unit="B", unit_scale=True, disable=not on_terminal, dynamic_ncols=True,
    ) as bar:  # fmt: skip
        try:
            progress = logbooks.verify(cache, logbook, say, bar.update)
        except KeyboardInterrupt:
            if state is not None:
                raise
            click.echo("stopped; with `--state FILE` it would go on from here", err=True)
            raise SystemExit(int(ExitCode.STOPPED)) from None
    if as_json:
        problems = [{"path": each.path, "why": each.why} for each in progress.problems]
        record = {"files": progress.files, "bytes": progress.bytes, "problems": problems}
        click.echo(json.dumps(record))
    elif not quiet:
        click.echo(
            f"{options.counted(progress.files, 'file')} read, {shown_size(progress.bytes)}; "
            f"{options.counted(len(progress.problems), 'problem')}"
        )
    if progress.problems:
        click.echo("hint: `pipeline cache repair` moves bad files to the quarantine", err=True)
    raise SystemExit(int(ExitCode.SOME_FAILED if progress.problems else ExitCode.OK))


@cache.command()
@options.cache_option
@_state_option("Look only at the problems that verify noted here.")
@grace_option
@json_option
def repair(cache: Location, state: Path | None, grace: int, as_json: bool) -> None:
    """Move bad files to cache/quarantine, remove temporary files that were left over.

    Without --state, every entry is read. Refused while an encoder or a run uses the cache (exit
    code 5).

    \b
    Example:
      pipeline cache repair
      pipeline cache repair --state verify.state
    """
    from pipeline.store import repair as repairs
    from pipeline.store.logbook import read_progress

    _enter(cache)
    names = None
    if state is not None:
        names = [problem.path for problem in read_progress(cache, state).problems]
    done = []
    for each in repairs.repair(cache, names, grace):
        done.append(each)
        if not as_json:
            what = "removed" if each.moved_to is None else f"moved to {each.moved_to}"
            click.echo(options.printable(f"{each.path}: {each.why}: {what}"))
    if as_json:
        click.echo(json.dumps({"repaired": [each.as_record() for each in done]}))
    else:
        click.echo(f"{options.counted(len(done), 'file')} repaired")


@cache.command()
@options.cache_option
@click.option(
    "--max-bytes",
    type=ByteSize(),
    required=True,
    metavar="SIZE",
    help="What the entries may take in all, as 500GB.",
)
@click.option(
    "--older-than",
    type=Age(),
    metavar="AGE",
    help="Delete only what was not used for so long, as 90d, even if that is not enough.",
)
@click.option(
    "--keep",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="JOB",
    help="Delete nothing that this job needs; may be repeated.",
)
@click.option("--apply", is_flag=True, help="Delete; without it, only tell.")
@grace_option
@options.model_options
@options.pixel_options
@decode_options
@options.place_options
@json_option
def gc(
    max_bytes: int,
    older_than: int | None,
    keep: tuple[Path, ...],
    apply: bool,
    grace: int,
    as_json: bool,
    **values: Any,
) -> None:
    """Delete entries, the least recently used first, until the rest fits a budget.

    Only tells what it would do, unless --apply is given; then it is refused while an encoder or
    a run uses the cache (exit code 5). The model and pixel options say how the jobs of --keep are
    run: they decide which entries those need.

    \b
    Example:
      pipeline cache gc --max-bytes 500GB
      pipeline cache gc --max-bytes 2TB --older-than 90d --keep jobs/nightly.jsonl --apply
    """
    from pipeline.store.sweep import Budget, sweep

    _enter(values["cache"])
    root = values["cache"]
    before_s = None if older_than is None else time.time() - older_than

    def needed() -> Collection[str]:
        return _keys_to_keep(keep, values) if keep else ()

    budget = Budget(max_bytes, before_s)
    swept = sweep(root, budget, needed=needed, apply=apply, grace_s=grace)
    if as_json:
        click.echo(json.dumps(swept.as_record()))
    else:
        show_swept(swept)
    if swept.evicted and not apply:
        click.echo("nothing was deleted; `--apply` does it", err=True)


def _keys_to_keep(jobs: tuple[Path, ...], values: dict[str, Any]) -> Collection[str]:
    """What the jobs need; says which of their pages the cache does not have."""
    from pipeline.cli.advice import failure_line
    from pipeline.needs import keys_to_keep, needs_of
    from pipeline.run.images import PageOptions, open_pages

    options.say_model(values["model"], quiet=False)
    pages = PageOptions(**{name: values[name] for name in PageOptions.__dataclass_fields__})
    needs = needs_of(jobs, open_pages(pages), values["base"], values["roots"])
    for failure in needs.failures:
        click.echo(failure_line(failure), err=True)
    if needs.missing:
        missing = options.counted(len(needs.missing), "page")
        click.echo(f"warning: {missing} of the jobs to keep not in the cache", err=True)
    return keys_to_keep(needs)


def _enter(root: Location) -> None:
    from pipeline.store.formats import require_cache

    for message in require_cache(root):
        click.echo(f"warning: {message}", err=True)
