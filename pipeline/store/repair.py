"""Move what `verify` finds out of the way, so that it is a miss and made again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.durable import TEMPORARY_SUFFIX
from pipeline.store.check import FOREIGN, LEFT_OVER, check_files, check_named
from pipeline.store.hold import GRACE_S, hold_alone
from pipeline.store.layout import QUARANTINE, whole_name
from pipeline.store.location import Location
from pipeline.store.media import medium_of
from pipeline.store.medium import Medium


@dataclass(frozen=True, slots=True)
class Repaired:
    """A file that was bad, from the cache's root; it lies at `moved_to` now, None: removed."""

    path: str
    why: str
    moved_to: str | None

    def as_record(self) -> dict[str, Any]:
        """As `repair --json` prints it."""
        return asdict(self)


def repair(
    root: Location, names: Iterable[str] | None = None, grace_s: float = GRACE_S
) -> Iterator[Repaired]:
    """Quarantine every file of the cache that is not whole or not ours; remove left-over ones.

    `names` (paths from the version directory) restricts it to files found before; each is read
    again. A temporary file is left over if it was there before nobody else used the cache: who
    writes one holds the lock. Raises LockedError while an encoder or a run is alive. An object
    store has no locks: there, a temporary or foreign file stays until it is older than `grace_s`.
    """
    medium = medium_of(root)
    with hold_alone(root, grace_s) as alone_since_ns:
        checked = check_files(root, alone=True) if names is None else check_named(root, names)
        for file in checked:
            name = whole_name(file.name)
            if file.why == LEFT_OVER:
                yield from _remove(medium, name, alone_since_ns)
            elif file.why == FOREIGN and not isinstance(root, Path):
                if _is_older(medium, name, alone_since_ns):
                    yield from _move(medium, name, file.why)
            elif file.why is not None:
                yield from _move(medium, name, file.why)
        for listed in medium.listed(QUARANTINE):
            if listed.name.startswith(".") and listed.name.endswith(TEMPORARY_SUFFIX):
                yield from _remove(medium, f"{QUARANTINE}/{listed.name}", alone_since_ns)


def _move(medium: Medium, name: str, why: str) -> Iterator[Repaired]:
    moved = medium.set_aside(name, why)
    if moved is not None:
        yield Repaired(name, why, moved)


def _remove(medium: Medium, name: str, alone_since_ns: int) -> Iterator[Repaired]:
    if _is_older(medium, name, alone_since_ns):
        medium.delete(name)
        yield Repaired(name, LEFT_OVER, None)


def _is_older(medium: Medium, name: str, time_ns: int) -> bool:
    found = medium.state(name, link=True)
    return found is not None and found.st_mtime_ns <= time_ns
