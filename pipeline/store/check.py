"""Is what lies in the cache what was put there? Reads, and changes nothing."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.durable import TEMPORARY_SUFFIX
from pipeline.store import documents
from pipeline.store.entry import BadEntry, Entry, entry_problem, from_parquet
from pipeline.store.hold import is_in_use
from pipeline.store.layout import DOCUMENTS, version_directory
from pipeline.store.walk import Place, walk

LEFT_OVER = "a temporary file that was left over"
FOREIGN = "a file that does not belong here"
WRITING_S = 3600.0  # in a cache in use, a younger temporary file may still be written

_MANIFEST = re.compile(r"[0-9a-f]{64}-\w+\.json")


@dataclass(frozen=True, slots=True)
class Checked:
    """A file that was read: its path from the version directory, and what is wrong or None."""

    name: str
    bytes: int
    why: str | None


def check_files(root: Path, after: str | None = None, *, alone: bool = False) -> Iterator[Checked]:
    """Every file of the cache, of every tower, in the order of `walk`; one is in memory at a time.

    In a cache that others use, a file that goes meanwhile is passed over, and so is a temporary
    one that may still be written. `alone` says that the caller knows there are no others.
    """
    yield from _checked(walk(root, after), not alone and is_in_use(root))


def check_named(root: Path, names: Iterable[str]) -> Iterator[Checked]:
    """The same of single files, by their path from the version directory; none outside it."""
    base = version_directory(root)
    inside = (name for name in names if not {"", ".", ".."} & set(name.split("/")))
    yield from _checked((Place(name, f"{base}/{name}") for name in inside), in_use=False)


def _checked(places: Iterable[Place], in_use: bool) -> Iterator[Checked]:
    for place in places:
        try:
            found = os.lstat(place.path)
        except FileNotFoundError:
            continue
        young = time.time() - found.st_mtime < WRITING_S
        if in_use and young and place.name.endswith(TEMPORARY_SUFFIX):
            continue
        why = _problem_of(place, found.st_mode)
        if why is None or os.path.lexists(place.path):
            yield Checked(place.name, found.st_size, why)


def _problem_of(place: Place, mode: int) -> str | None:
    parts, path = place.parts, Path(place.path)
    if stat.S_ISDIR(mode):
        return "a directory stands where a file should be"
    if path.suffix == TEMPORARY_SUFFIX:
        return LEFT_OVER
    if len(parts) != 3:
        return FOREIGN
    if parts[1] != parts[2][:2]:
        return "it lies in the wrong directory"
    if parts[0] == DOCUMENTS:
        return manifest_problem(path) if _MANIFEST.fullmatch(parts[2]) else FOREIGN
    if path.suffix != ".parquet":
        return FOREIGN
    read = read_entry(path, path.stem, parts[0])
    return read.why if isinstance(read, BadEntry) else None


def manifest_problem(path: Path) -> str | None:
    """Why a document manifest can't be used; None if it can."""
    try:
        documents.from_json(path.read_bytes())
    except (OSError, *documents.DAMAGE) as error:
        return f"the manifest is unreadable: {error}"
    return None


def read_entry(path: Path, key: str, tower_fingerprint: str) -> Entry | BadEntry:
    """The entry in a file with digest, shape and values checked, or what is wrong with it."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return BadEntry(key, "there is no such entry")
    except OSError as error:
        return BadEntry(key, f"the file can't be read: {error.strerror or error}")
    return entry_of(data, key, tower_fingerprint)


def entry_of(data: bytes, key: str, tower_fingerprint: str) -> Entry | BadEntry:
    """The entry in a file's bytes, or what is wrong with it."""
    try:
        entry = from_parquet(data)
    except Exception as error:  # whatever pyarrow makes of a damaged file
        return BadEntry(key, f"the file is damaged: {error}")
    problem = entry_problem(entry, key, tower_fingerprint)
    return entry if problem is None else BadEntry(key, problem)
