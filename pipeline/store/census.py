"""What the cache holds and when it was last used, counted in one pass; opens no entry.

An entry takes 50 bytes here: a million of them stay far below what one page takes in memory.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Container
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.durable import TEMPORARY_SUFFIX
from pipeline.store.history import LookUps, last_look_ups
from pipeline.store.layout import DOCUMENTS, QUARANTINE, entry_name, whole_name
from pipeline.store.location import Location
from pipeline.store.media import medium_of
from pipeline.store.medium import TAIL_BYTES, FileState
from pipeline.store.walk import Place, walk

AGES_DAYS = (1, 7, 30, 90, 365)
RUNS_SHOWN = 10
_DAY_S = 86_400
_KEY_BYTES = 32


@dataclass(slots=True)
class Heap:
    """How many files, and how many bytes they take."""

    files: int = 0
    bytes: int = 0

    def add(self, size_bytes: int) -> None:
        self.files += 1
        self.bytes += size_bytes


@dataclass(slots=True)
class Census:
    """Every entry as number i: its key, the number of its tower, size and last use (mtime).

    `kept` says which of them must stay. Manifests, temporary and other files are counted alone.
    """

    root: Location
    towers: list[str] = field(default_factory=list)
    keys: bytearray = field(default_factory=bytearray)
    tower_numbers: array[int] = field(default_factory=lambda: array("I"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    uses_ns: array[int] = field(default_factory=lambda: array("q"))
    kept: array[int] = field(default_factory=lambda: array("B"))
    documents: Heap = field(default_factory=Heap)
    temporary: Heap = field(default_factory=Heap)
    foreign: Heap = field(default_factory=Heap)
    quarantine: Heap = field(default_factory=Heap)

    @property
    def entries(self) -> int:
        """How many there are."""
        return len(self.sizes)

    @property
    def bytes(self) -> int:
        """What all entries take on disk."""
        return sum(self.sizes)

    def key(self, number: int) -> str:
        """The key of entry `number`, 64 hex digits."""
        return self.keys[number * _KEY_BYTES : (number + 1) * _KEY_BYTES].hex()

    def tower(self, number: int) -> str:
        """The tower fingerprint of entry `number`."""
        return self.towers[self.tower_numbers[number]]


def take_census(root: Location, keep: Container[str] = ()) -> Census:
    """Count what lies in the cache `root`; entries whose key is in `keep` must stay."""
    census, medium = Census(root), medium_of(root)
    for place in walk(root):
        try:
            found = place.state or medium.state(whole_name(place.name))
        except OSError:
            continue
        if found is not None:  # else it has gone meanwhile
            _count(census, place, found, keep)
    for listed in medium.listed(QUARANTINE):
        found = listed.state or medium.state(f"{QUARANTINE}/{listed.name}")
        if found is not None and not listed.is_directory:
            census.quarantine.add(found.st_size)
    return census


def _count(census: Census, place: Place, found: FileState, keep: Container[str]) -> None:
    parts = place.parts
    stem, dot, ending = parts[-1].rpartition(".")
    if dot + ending == TEMPORARY_SUFFIX:
        census.temporary.add(found.st_size)
    elif len(parts) == 3 and parts[0] == DOCUMENTS:
        census.documents.add(found.st_size)
    elif len(parts) == 3 and ending == "parquet" and (key := _key_of(stem)) is not None:
        if not census.towers or census.towers[-1] != parts[0]:  # they come one after the other
            census.towers.append(parts[0])
        census.keys += key
        census.tower_numbers.append(len(census.towers) - 1)
        census.sizes.append(found.st_size)
        census.uses_ns.append(found.st_mtime_ns)
        census.kept.append(stem in keep)
    else:
        census.foreign.add(found.st_size)


def _key_of(stem: str) -> bytes | None:
    try:
        key = bytes.fromhex(stem)
    except ValueError:
        return None
    return key if len(key) == _KEY_BYTES and key.hex() == stem else None


# ---------------------------------------------------------------- for people and machines


@dataclass(frozen=True, slots=True)
class TowerCount:
    """One tower's entries; `last_use_s` since the epoch."""

    fingerprint: str
    family: str | None
    entries: int
    bytes: int
    last_use_s: float


@dataclass(frozen=True, slots=True)
class AgeCount:
    """Entries last used at most `up_to_days` ago and not in the row before; None: longer ago."""

    up_to_days: int | None
    entries: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """What `pipeline cache stats` tells."""

    entries: int
    bytes: int
    towers: tuple[TowerCount, ...]
    ages: tuple[AgeCount, ...]
    documents: Heap
    quarantine: Heap
    temporary: Heap
    foreign: Heap
    runs: tuple[LookUps, ...]  # the last one first

    def as_record(self) -> dict[str, Any]:
        """As `stats --json` prints it."""
        return asdict(self) | {"runs": [run.as_record() for run in self.runs]}


def statistics(census: Census, now_s: float | None = None) -> Statistics:
    """The totals of a census; of each tower one entry's footer is read for its family."""
    sizes = np.asarray(census.sizes)
    uses = np.asarray(census.uses_ns)
    numbers = np.asarray(census.tower_numbers)
    return Statistics(
        entries=census.entries,
        bytes=int(sizes.sum()),
        towers=tuple(
            _tower_count(census, number, sizes, uses, numbers == number)
            for number in range(len(census.towers))
        ),
        ages=_ages(sizes, uses, time.time() if now_s is None else now_s),
        documents=census.documents,
        quarantine=census.quarantine,
        temporary=census.temporary,
        foreign=census.foreign,
        runs=last_look_ups(census.root, RUNS_SHOWN),
    )


def _tower_count(
    census: Census,
    number: int,
    sizes: NDArray[np.int64],
    uses: NDArray[np.int64],
    its: NDArray[np.bool_],
) -> TowerCount:
    fingerprint = census.towers[number]
    return TowerCount(
        fingerprint=fingerprint,
        family=_family(census, int(np.argmax(its)), fingerprint),
        entries=int(its.sum()),
        bytes=int(sizes[its].sum()),
        last_use_s=round(int(uses[its].max()) / 1e9, 3),
    )


def _family(census: Census, number: int, fingerprint: str) -> str | None:
    from pipeline.store.entry import read_footer

    name = entry_name(fingerprint, census.key(number))
    try:
        return medium_of(census.root).load(name, read_footer, TAIL_BYTES).family
    except Exception:  # whatever pyarrow makes of a damaged file; `verify` tells
        return None


def _ages(sizes: NDArray[np.int64], uses: NDArray[np.int64], now_s: float) -> tuple[AgeCount, ...]:
    days = (now_s - uses / 1e9) / _DAY_S
    row = np.searchsorted(np.array(AGES_DAYS, float), days)  # the row whose bound is not below
    return tuple(
        AgeCount(bound, int((row == number).sum()), int(sizes[row == number].sum()))
        for number, bound in enumerate((*AGES_DAYS, None))
    )
