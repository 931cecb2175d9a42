"""What this machine remembers of files as they were, so that an unchanged one is not read again.

A local SQLite file, as git's index is one: path and state of a file → what came of it. It is never
shared with other machines and proves nothing about a cache; it can be deleted at any time. A file
that was changed just before it was read is not remembered, for another change could leave it in
the same state.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from pipeline.errors import UsageError
from pipeline.tree import files_below

VARIABLE = "PIPELINE_MEMO"  # another file, or a directory for it; empty: nothing is remembered

_VERSION = 1
_HEADER = b"SQLite format 3\0"  # and the application's number at offset 68, big-endian
_APPLICATION = 0x564C4D50
_MAX_BYTES = 2 << 30
_UNSETTLED_NS = 2_000_000_000  # coarser than the time stamps of any file system in use
_AT_ONCE = 500  # SQLite takes 999 parameters and more
_BUSY_S = 5.0
_MAX_UNWRITTEN = 2_000
_TABLE = """
CREATE TABLE facts (subject TEXT, path TEXT, state TEXT, value TEXT, PRIMARY KEY (subject, path))
WITHOUT ROWID
"""


def memo_path() -> Path | None:
    """Where the memo lies: $PIPELINE_MEMO, else below the user's cache directory, one per host.

    Raises UsageError if another file lies there, which is never touched.
    """
    named, name = os.environ.get(VARIABLE), f"memo-{os.uname().nodename}.sqlite"
    if named == "":
        return None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if named is None:
        path = Path(base) / "vlm-page-pipeline" / name
        if not _may_write(path):  # nobody else's: damaged
            with contextlib.suppress(OSError):
                path.unlink()
        return path
    path = Path(named, name) if Path(named).is_dir() else Path(named)
    if not _may_write(path):
        raise UsageError(
            f"`{path}` is no memo of this program, and would be overwritten",
            f"name another file in {VARIABLE}, or delete that one",
        )
    return path


def _may_write(path: Path) -> bool:
    """True if a file is our own, empty, absent, or can't be read anyway."""
    try:
        with path.open("rb") as file:
            head = file.read(100)
    except OSError:
        return True
    ours = head.startswith(_HEADER) and head[68:72] == _APPLICATION.to_bytes(4, "big")
    return ours or not head


def state_of(found: os.stat_result) -> str:
    """Size, mtime, inode and ctime: in the same state a file holds the same bytes.

    ctime tells what mtime does not, a file put in another's place with its time stamp.
    """
    return f"{found.st_size} {found.st_mtime_ns} {found.st_ino} {found.st_ctime_ns}"


def is_settled(found: os.stat_result, now_ns: int | None = None) -> bool:
    """False for a file that was changed so lately that its time stamps could hide a change."""
    now = time.time_ns() if now_ns is None else now_ns
    return max(found.st_mtime_ns, found.st_ctime_ns) < now - _UNSETTLED_NS


@functools.cache
def program_state(*libraries: str) -> str:
    """16 hex digits that another version of this program has others of, or of these libraries."""
    digest = hashlib.sha256()
    for name in (__package__, *libraries):
        spec = importlib.util.find_spec(name)  # does not import it
        origin = None if spec is None else spec.origin
        paths = [origin or ""]
        if name == __package__ and origin is not None:
            paths = sorted(files_below(os.path.dirname(origin)))
        for path in paths:
            if path.endswith(".py"):
                found = os.stat(path)
                digest.update(f"{path} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


class Memo:
    """Facts about files: by subject and path, true while the file's state is the same.

    Whatever is wrong with the SQLite file, nothing is remembered and nothing fails; a damaged one
    is begun anew. `distrust` keeps from reading what it says, not from writing.
    """

    def __init__(self, path: Path | None, *, distrust: bool = False) -> None:
        self._path = path
        self._distrust = distrust
        self._opened: sqlite3.Connection | None = None
        self._new: dict[tuple[str, str], tuple[str, str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def recall(self, subject: str, path: str, state: str) -> Any:
        """The fact about a file in this state, None if there is none."""
        (found,) = self.recall_all(subject, [(path, state)])
        return found

    def recall_all(self, subject: str, files: Sequence[tuple[str, str]]) -> Iterator[Any]:
        """The fact about each (path, state) in order, None where there is none."""
        for first in range(0, len(files), _AT_ONCE):
            part = [(_storable(path), state) for path, state in files[first : first + _AT_ONCE]]
            rows = self._rows(subject, [path for path, _ in part])
            found = [rows.get(path, ("", "")) for path, _ in part]
            same = zip(found, part, strict=True)
            yield from _facts(
                [value if then == state else "null" for (then, value), (_, state) in same]
            )

    def note(self, subject: str, path: str, state: str, fact: Any) -> None:
        """Remember a fact, JSON data; it is written at the end, or when there are many."""
        value = json.dumps(fact, separators=(",", ":"))
        self._new[subject, _storable(path)] = state, value
        if len(self._new) >= _MAX_UNWRITTEN:
            self.flush()

    def flush(self) -> None:
        """Write what was noted."""
        rows = [(*name, *fact) for name, fact in self._new.items()]
        self._new.clear()
        try:
            database = self._database(make=True) if rows else None
            if database is not None:
                database.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?, ?, ?)", rows)
                database.commit()
        except (sqlite3.Error, OSError) as error:
            self._give_up(error)

    def _rows(self, subject: str, paths: Sequence[str]) -> dict[str, tuple[str, str]]:
        marks = ",".join("?" * len(paths))
        query = f"SELECT path, state, value FROM facts WHERE subject = ? AND path IN ({marks})"
        try:
            database = None if self._distrust else self._database(make=False)
            found = [] if database is None else database.execute(query, [subject, *paths])
            return {path: (state, value) for path, state, value in found}
        except (sqlite3.Error, OSError) as error:
            self._give_up(error)
            return {}

    def _database(self, make: bool) -> sqlite3.Connection | None:
        path = self._path
        if self._opened is None and path is not None and (make or path.exists()):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not _may_write(path):
                raise sqlite3.OperationalError(f"{path} is another program's")
            if path.exists() and path.stat().st_size > _MAX_BYTES:
                path.unlink()
            # used by one thread at a time, not always the same
            self._opened = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False)
            if _version(self._opened) != _VERSION:
                _begin_anew(self._opened)
        return self._opened

    def _give_up(self, error: Exception) -> None:
        """Do without the memo; one that is damaged goes."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        path, self._path = self._path, None
        damaged = isinstance(error, sqlite3.DatabaseError)
        if damaged and not isinstance(error, sqlite3.OperationalError) and path is not None:
            with contextlib.suppress(OSError):
                if _may_write(path):
                    path.unlink()


def _version(database: sqlite3.Connection) -> int:
    (found,) = database.execute("PRAGMA user_version").fetchone()
    return int(found)


def _begin_anew(database: sqlite3.Connection) -> None:
    """Make the table, unless another process has made it since the version was asked for."""
    database.execute("BEGIN IMMEDIATE")
    if _version(database) != _VERSION:
        database.execute("DROP TABLE IF EXISTS facts")
        database.execute(_TABLE)
        database.execute(f"PRAGMA user_version = {_VERSION}")
        database.execute(f"PRAGMA application_id = {_APPLICATION}")
    database.commit()


def _facts(values: list[str]) -> list[Any]:
    try:
        found: list[Any] = json.loads(f"[{','.join(values)}]")  # quicker than one by one
        if len(found) == len(values):
            return found
    except ValueError:
        pass
    return [None] * len(values)  # SQLite does not see a flipped bit


def _storable(path: str) -> str:
    """The path as SQLite takes it: names need not be UTF-8."""
    return path if path.isascii() else path.encode("utf-8", "backslashreplace").decode()
