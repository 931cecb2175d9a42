"""What `pipeline cache stats` and `gc` print for people."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from pipeline.cli import options
from pipeline.cli.amounts import entries, shown_size

if TYPE_CHECKING:
    from pipeline.store.census import Statistics
    from pipeline.store.history import LookUps
    from pipeline.store.sweep import Swept


def show_statistics(found: Statistics) -> None:
    """What `stats` tells."""
    click.echo(f"{entries(found.entries)}, {shown_size(found.bytes)}")
    for tower in found.towers:
        used = time.strftime("%Y-%m-%d", time.localtime(tower.last_use_s))
        click.echo(
            f"tower {tower.fingerprint[:12]}… ({tower.family or 'unreadable'}): "
            f"{entries(tower.entries)}, {shown_size(tower.bytes)}, "
            f"last used {used}"
        )
    for age in found.ages if found.entries else ():
        label = "longer ago" if age.up_to_days is None else f"up to {age.up_to_days} d ago"
        share = "#" * round(30 * age.bytes / max(1, found.bytes))
        click.echo(f"used {label:<15} {age.entries:>9} {shown_size(age.bytes):>9} {share}".rstrip())
    for name in ("documents", "quarantine", "temporary", "foreign"):
        heap = getattr(found, name)
        if heap.files:
            click.echo(f"{name}: {options.counted(heap.files, 'file')}, {shown_size(heap.bytes)}")
    for run in found.runs:
        click.echo(_run_line(run))


def _run_line(run: LookUps) -> str:
    ended = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.ended_s))
    rate = "" if run.hit_rate is None else f" ({run.hit_rate:.0%})"
    pages = options.counted(run.pages, "page")
    return (
        f"{run.command} {ended}: {run.cached} of {pages} cached{rate}, "
        f"{run.encoded} encoded, {run.failed} failed"
    )


def show_swept(swept: Swept) -> None:
    """What `gc` does, or would do."""
    verb = "deleted" if swept.applied else "would delete"
    click.echo(
        f"gc {verb} {swept.evicted} of {entries(swept.entries)}, "
        f"{shown_size(swept.evicted_bytes)} of {shown_size(swept.bytes)}"
        + (f"; {swept.kept} needed by the named jobs stay" if swept.kept else "")
    )
    if swept.over_budget_bytes:
        over = shown_size(swept.over_budget_bytes)
        click.echo(f"the rest is {over} above the budget", err=True)
