"""What the last runs found in the cache: one small file each, for the rates of `cache stats`."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.errors import StoreError
from pipeline.store.layout import RUNS
from pipeline.store.location import Location
from pipeline.store.media import medium_of
from pipeline.store.medium import Medium

_KEPT = 50
_SLACK = 25  # so that not every run has one to delete


@dataclass(frozen=True, slots=True)
class LookUps:
    """A run's pages: how many were asked for, were there, were encoded, failed.

    `ended_s` is since the epoch.
    """

    command: str
    ended_s: float
    pages: int
    cached: int
    encoded: int
    failed: int

    @property
    def hit_rate(self) -> float | None:
        """Pages that were there, of all; None of no page."""
        return self.cached / self.pages if self.pages else None

    def as_record(self) -> dict[str, Any]:
        """As `stats --json` prints it."""
        rate = self.hit_rate
        return asdict(self) | {"hit_rate": None if rate is None else round(rate, 4)}


def note_look_ups(
    root: Location, command: str, *, pages: int, cached: int, encoded: int, failed: int
) -> None:
    """Add a run to those that are remembered, and forget the oldest.

    Nothing is noted where no cache is, or where it can't be written: a run is no worse for that.
    """
    now = time.time()
    run = LookUps(command, round(now, 3), pages, cached, encoded, failed)
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now))
    name = f"{RUNS}/{stamp}.{int(now % 1 * 1e6):06d}-{os.urandom(3).hex()}.json"
    medium = medium_of(root)
    try:
        if medium.is_there():
            medium.write(name, json.dumps(asdict(run)).encode())
            _forget_oldest(medium)
    except (OSError, StoreError):
        pass


def _forget_oldest(medium: Medium) -> None:
    names = sorted(each.name for each in medium.listed(RUNS) if each.name.endswith(".json"))
    if len(names) > _KEPT + _SLACK:
        for name in names[:-_KEPT]:
            medium.delete(f"{RUNS}/{name}")


def last_look_ups(root: Location, count: int) -> tuple[LookUps, ...]:
    """Up to `count` runs, the last one first; files that can't be read as one are left out."""
    medium = medium_of(root)
    names = sorted((each.name for each in medium.listed(RUNS)), reverse=True)
    found: list[LookUps] = []
    for name in names:
        if len(found) == count:
            break
        try:
            found.append(_look_ups_in(medium.read(f"{RUNS}/{name}")))
        except (OSError, StoreError, ValueError, TypeError, KeyError, RecursionError):
            continue  # it has gone meanwhile, or is another's
    return tuple(found)


def _look_ups_in(data: bytes) -> LookUps:
    record = json.loads(data)
    counts = (record["pages"], record["cached"], record["encoded"], record["failed"])
    pages, cached, encoded, failed = map(int, counts)
    return LookUps(str(record["command"]), float(record["ended_s"]), pages, cached, encoded, failed)
