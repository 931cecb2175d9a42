"""Move what `verify` finds out of the way, so that it is a miss and made again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.durable import TEMPORARY_SUFFIX
from pipeline.store.check import LEFT_OVER, check_files, check_named
from pipeline.store.files import set_aside, write_error
from pipeline.store.hold import hold_alone
from pipeline.store.layout import QUARANTINE, version_directory


@dataclass(frozen=True, slots=True)
class Repaired:
    """A file that was bad, from the cache's root; it lies at `moved_to` now, None: removed."""

    path: str
    why: str
    moved_to: str | None

    def as_record(self) -> dict[str, Any]:
        """As `repair --json` prints it."""
        return asdict(self)


def repair(root: Path, names: Iterable[str] | None = None) -> Iterator[Repaired]:
    """Quarantine every file of the cache that is not whole or not ours; remove left-over ones.

    `names` (paths from the version directory) restricts it to files found before; each is read
    again. A temporary file is left over if it was there before nobody else used the cache: who
    writes one holds the lock. Raises LockedError while an encoder or a run is alive.
    """
    base = version_directory(root)
    with hold_alone(root) as alone_since_ns:
        checked = check_files(root, alone=True) if names is None else check_named(root, names)
        for file in checked:
            path = base / file.name
            if file.why == LEFT_OVER:
                yield from _remove(root, path, alone_since_ns)
            elif file.why is not None:
                moved = set_aside(root, path, file.why)
                if moved is not None:
                    yield Repaired(_name(root, path), file.why, _name(root, moved))
        for path in sorted((root / QUARANTINE).glob(f".*{TEMPORARY_SUFFIX}")):
            yield from _remove(root, path, alone_since_ns)


def _remove(root: Path, path: Path, alone_since_ns: int) -> Iterator[Repaired]:
    try:
        if os.lstat(path).st_mtime_ns <= alone_since_ns:
            os.unlink(path)
            yield Repaired(_name(root, path), LEFT_OVER, None)
    except FileNotFoundError:
        return
    except OSError as error:
        raise write_error(path, error) from error


def _name(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()
