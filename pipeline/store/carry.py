"""Entries and manifests in a tar, to carry them to another machine's cache.

Members are named as in the cache: entries first, then manifests, at last `contents.json` with
their numbers, which tells a whole archive from one that was cut. Any tar program can read it.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.durable import replace_file
from pipeline.errors import StoreError, UsageError
from pipeline.keys import canonical_json
from pipeline.store.check import entry_of, manifest_of, manifest_problem
from pipeline.store.entry import BadEntry
from pipeline.store.files import write_error
from pipeline.store.hold import hold_shared
from pipeline.store.layout import DOCUMENTS, FORMAT_VERSION, VERSION, whole_name
from pipeline.store.location import Location
from pipeline.store.logbook import Found
from pipeline.store.media import medium_of
from pipeline.store.medium import DamagedError, Medium
from pipeline.store.walk import walk

MAX_ENTRY_BYTES = 4 << 30  # more than any page; an archive can't fill the memory
_CONTENTS = "contents.json"
_ENTRY = re.compile(r"v([0-9]+)/([0-9a-f]{64})/([0-9a-f]{2})/(\3[0-9a-f]{62})\.parquet")
_MANIFEST = re.compile(r"v([0-9]+)/documents/([0-9a-f]{2})/\2[0-9a-f]{62}-[0-9a-f]+\.json")
_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True)
class Choice:
    """Paths from the version directory: which entries to carry, and which manifests."""

    entries: Iterable[str]
    manifests: Iterable[str]


@dataclass(slots=True)
class Carried:
    """What went into an archive or came out of it; `there` was in the cache before.

    `bytes` are of the entries that were carried.
    """

    entries: int = 0
    manifests: int = 0
    bytes: int = 0
    there: int = 0
    problems: list[Found] = field(default_factory=list)

    def as_record(self) -> dict[str, Any]:
        """As `export --json` and `import --json` print it."""
        return asdict(self)


def everything(root: Location, tower: str | None = None) -> Choice:
    """All that the cache holds, or the entries of one tower, named by how its fingerprint begins.

    Raises UsageError if no tower, or more than one, begins so.
    """
    if tower is not None:
        listed = medium_of(root).listed(VERSION)
        names = [each.name for each in listed if each.name != DOCUMENTS]
        found = [name for name in names if name.startswith(tower)]
        if len(found) != 1:
            why = "no tower" if not found else "more than one tower"
            raise UsageError(
                f"{why} in the cache begins with `{tower}`", "`pipeline cache stats` lists them"
            )
        (tower,) = found
    return Choice(
        (
            place.name
            for place in walk(root)
            if place.name.endswith(".parquet") and tower in (None, place.parts[0])
        ),
        (
            place.name
            for place in walk(root, after=DOCUMENTS)
            if place.parts[0] == DOCUMENTS and place.name.endswith(".json")
        ),
    )


# ---------------------------------------------------------------- out


def export_entries(
    root: Location,
    archive: Path,
    choice: Choice,
    watch: Callable[[int], object] = lambda size: None,
) -> Carried:
    """Write what was chosen into a tar; one entry is in memory at a time.

    A bad entry is left out and named. Raises UsageError if the archive is there already,
    StoreError if it can't be written; nothing half-written is left.
    """
    if archive.exists():
        raise UsageError(f"`{archive}` is there already", "name another file, or delete it")
    carried = Carried()
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        replace_file(archive, _members(root, choice, carried, watch))
    except OSError as error:
        found = write_error(archive, error)
        raise StoreError(found.message, "name a file on another disk") from error
    return carried


def _members(
    root: Location, choice: Choice, carried: Carried, watch: Callable[[int], object]
) -> Iterator[bytes]:
    medium = medium_of(root)
    for name in choice.entries:
        try:
            data = medium.read(whole_name(name))
        except OSError as error:
            carried.problems.append(Found(name, f"it can't be read: {error.strerror or error}"))
            continue
        read = entry_of(data, Path(name).stem, name.split("/")[0], columns=True)
        if isinstance(read, BadEntry):
            carried.problems.append(Found(name, read.why))
            continue
        yield from _member(whole_name(name), data)
        carried.entries, carried.bytes = carried.entries + 1, carried.bytes + len(data)
        watch(len(data))
    for name in choice.manifests:
        if (why := manifest_problem(medium, whole_name(name))) is not None:
            carried.problems.append(Found(name, why))
            continue
        yield from _member(whole_name(name), medium.read(whole_name(name)))
        carried.manifests += 1
    contents = {"entries": carried.entries, "manifests": carried.manifests}
    yield from _member(_CONTENTS, canonical_json(contents))
    yield bytes(2 * _BLOCK_BYTES)


def _member(name: str, data: bytes) -> Iterator[bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o644
    yield info.tobuf(tarfile.PAX_FORMAT)
    yield data
    yield bytes(-len(data) % _BLOCK_BYTES)


# ---------------------------------------------------------------- in


def import_entries(
    root: Location,
    archive: Path,
    watch: Callable[[int], object] = lambda size: None,
    say: Callable[[str], object] = lambda message: None,
) -> Carried:
    """Put what an archive holds into the cache `root`; each entry is checked, none is overwritten.

    A bad member is left out and named. Raises StoreError for an archive that is cut or none:
    what was whole is kept, and the same import goes on from there. `say` is that of `hold_shared`.
    """
    carried = Carried()
    with hold_shared(root, say=say):
        try:
            with tarfile.open(archive, "r|") as tar:
                whole = _take_all(tar, medium_of(root), carried, watch)
        except tarfile.TarError as error:
            whole = False
            if not carried.entries + carried.there:
                hint = "`pipeline cache export` writes one"
                raise StoreError(f"`{archive}` is no archive of entries: {error}", hint) from error
    if not whole:
        raise StoreError(
            f"`{archive}` ends early, after {carried.entries + carried.there} entries",
            "carry it once more and import it again; the entries that came are kept",
        )
    return carried


def _take_all(
    tar: tarfile.TarFile, medium: Medium, carried: Carried, watch: Callable[[int], object]
) -> bool:
    """True if the archive is whole, as its last member tells."""
    for member in tar:
        file = tar.extractfile(member) if member.isfile() else None
        if file is None or member.size > MAX_ENTRY_BYTES:
            carried.problems.append(Found(member.name, "it is no file of a cache"))
            continue
        data = file.read()
        if member.name == _CONTENTS:
            return _is_all(data, carried)
        why = _take(member.name, data, medium, carried)
        if why is not None:
            carried.problems.append(Found(member.name, why))
        watch(member.size)
        tar.members.clear()  # type: ignore[attr-defined]  # else every header is kept
    return False


def _is_all(contents: bytes, carried: Carried) -> bool:
    try:
        said = json.loads(contents)
        count = said["entries"] + said["manifests"]
    except (ValueError, KeyError, TypeError):
        return False
    return bool(
        count <= carried.entries + carried.manifests + carried.there + len(carried.problems)
    )


def _take(name: str, data: bytes, medium: Medium, carried: Carried) -> str | None:
    """Put one member into the cache; or why not."""
    entry, manifest = _ENTRY.fullmatch(name), _MANIFEST.fullmatch(name)
    found = entry or manifest
    if found is None:
        return "it is no file of a cache"
    if int(found[1]) != FORMAT_VERSION:
        return f"format version {found[1]}, expected {FORMAT_VERSION}"
    if entry is not None:
        read = entry_of(data, entry[4], entry[2], columns=True)
        if isinstance(read, BadEntry):
            return read.why
    else:
        try:
            manifest_of(data)
        except DamagedError as damage:
            return f"the manifest is unreadable: {damage}"
    there = medium.state(name) is not None
    if there and (entry is not None or manifest_problem(medium, name) is None):
        carried.there += 1
        return None
    medium.write(name, data, once=entry is not None)
    if entry is not None:
        carried.entries, carried.bytes = carried.entries + 1, carried.bytes + len(data)
    else:
        carried.manifests += 1
    return None
