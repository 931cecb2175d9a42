"""Is what lies in the cache what was put there? Reads, and changes nothing."""

from __future__ import annotations

import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pipeline.durable import TEMPORARY_SUFFIX
from pipeline.store import documents
from pipeline.store.documents import Manifest
from pipeline.store.entry import BadEntry, Entry, entry_problem, from_parquet
from pipeline.store.hold import is_in_use
from pipeline.store.layout import DOCUMENTS, whole_name
from pipeline.store.location import Location
from pipeline.store.media import medium_of
from pipeline.store.medium import Access, DamagedError, Medium
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


def check_files(
    root: Location, after: str | None = None, *, alone: bool = False
) -> Iterator[Checked]:
    """Every file of the cache, of every tower, in the order of `walk`; one is in memory at a time.

    In a cache that others use, a file that goes meanwhile is passed over, and so is a temporary
    one that may still be written. `alone` says that the caller knows there are no others.
    """
    yield from _checked(medium_of(root), walk(root, after), not alone and is_in_use(root))


def check_named(root: Location, names: Iterable[str]) -> Iterator[Checked]:
    """The same of single files, by their path from the version directory; none outside it."""
    inside = (name for name in names if not {"", ".", ".."} & set(name.split("/")))
    yield from _checked(medium_of(root), map(Place, inside), in_use=False)


def _checked(medium: Medium, places: Iterable[Place], in_use: bool) -> Iterator[Checked]:
    for place in places:
        name = whole_name(place.name)
        found = place.state or medium.state(name, link=True)
        if found is None:
            continue
        young = time.time() - found.st_mtime < WRITING_S
        if in_use and young and place.name.endswith(TEMPORARY_SUFFIX):
            continue
        why = _problem_of(medium, place, found.st_mode)
        if why is None or medium.state(name, link=True) is not None:
            yield Checked(place.name, found.st_size, why)


def _problem_of(medium: Medium, place: Place, mode: int) -> str | None:
    parts = place.parts
    stem, _, ending = parts[-1].rpartition(".")
    if stat.S_ISDIR(mode):
        return "a directory stands where a file should be"
    if parts[-1].endswith(TEMPORARY_SUFFIX):
        return LEFT_OVER
    if len(parts) != 3:
        return FOREIGN
    if parts[1] != parts[2][:2]:
        return "it lies in the wrong directory"
    if parts[0] == DOCUMENTS:
        is_manifest = _MANIFEST.fullmatch(parts[2])
        return manifest_problem(medium, whole_name(place.name)) if is_manifest else FOREIGN
    if ending != "parquet":
        return FOREIGN
    read = read_entry(medium, whole_name(place.name), stem, parts[0], columns=True)
    return read.why if isinstance(read, BadEntry) else None


def manifest_problem(medium: Medium, name: str) -> str | None:
    """Why a document manifest can't be used; None if it can."""
    try:
        manifest_of(medium.read(name))
    except (OSError, DamagedError) as error:
        return f"the manifest is unreadable: {error}"
    return None


def manifest_of(data: bytes) -> Manifest:
    """The manifest in a file's bytes; raises DamagedError."""
    try:
        return documents.from_json(data)
    except documents.DAMAGE as error:
        raise DamagedError(str(error)) from error


def read_entry(
    medium: Access, name: str, key: str, tower_fingerprint: str, *, columns: bool = False
) -> Entry | BadEntry:
    """The entry in a file with digest, shape and values checked, or what is wrong with it.

    `columns` says to read what the footer repeats, too.
    """
    try:
        return medium.load(name, lambda data: whole_entry(data, key, tower_fingerprint, columns))
    except FileNotFoundError:
        return BadEntry(key, "there is no such entry")
    except DamagedError as damage:
        return BadEntry(key, str(damage))
    except OSError as error:
        return BadEntry(key, f"the file can't be read: {error.strerror or error}")


def entry_of(
    data: bytes, key: str, tower_fingerprint: str, *, columns: bool = False
) -> Entry | BadEntry:
    """The same of an entry in a file's bytes."""
    try:
        return whole_entry(data, key, tower_fingerprint, columns)
    except DamagedError as damage:
        return BadEntry(key, str(damage))


def whole_entry(data: bytes, key: str, tower_fingerprint: str, columns: bool) -> Entry:
    """The entry in a file's bytes with digest, shape and values checked; raises DamagedError."""
    try:
        entry = from_parquet(data, columns=columns)
    except Exception as error:  # whatever pyarrow makes of a damaged file
        raise DamagedError(f"the file is damaged: {error}") from error
    if (problem := entry_problem(entry, key, tower_fingerprint)) is not None:
        raise DamagedError(problem)
    return entry
