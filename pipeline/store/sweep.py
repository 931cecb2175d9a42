"""Delete entries down to a budget, the least recently used first."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.store.census import Census, take_census
from pipeline.store.hold import GRACE_S, hold_alone
from pipeline.store.layout import entry_name
from pipeline.store.location import Location
from pipeline.store.media import medium_of


@dataclass(frozen=True, slots=True)
class Budget:
    """What may stay: entries of `max_bytes` in all.

    With `used_before_s` (since the epoch) only what was last used before then may go, even if
    the budget is not met by that.
    """

    max_bytes: int
    used_before_s: float | None = None


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep deletes, or would if not `applied`; of `kept` entries a named job needs each."""

    applied: bool
    entries: int
    bytes: int
    evicted: int
    evicted_bytes: int
    kept: int
    oldest_left_s: float | None
    over_budget_bytes: int

    def as_record(self) -> dict[str, Any]:
        """As `gc --json` prints it."""
        return asdict(self)


def _nothing() -> Collection[str]:
    return ()


def sweep(
    root: Location,
    budget: Budget,
    *,
    needed: Callable[[], Collection[str]] = _nothing,
    apply: bool = False,
    grace_s: float = GRACE_S,
) -> Swept:
    """Bring the cache `root` within its budget, or with `apply` False only say what would go.

    `needed` gives the keys that must stay; it is asked once nobody else uses the cache. Raises
    LockedError while an encoder or a run does, StoreError where an entry can't be deleted. In an
    object store, which has no locks, nothing goes that was used in the last `grace_s`.
    """
    budget = _with_grace(budget, root, grace_s)
    with hold_alone(root, grace_s) if apply else nullcontext():
        census = take_census(root, frozenset(needed()))
        going = evictions(census, budget)
        if apply:
            going = _delete(census, going)
    return _swept(census, going, budget, apply)


def _with_grace(budget: Budget, root: Location, grace_s: float) -> Budget:
    if isinstance(root, Path):
        return budget
    used_before_s = time.time() - grace_s
    if budget.used_before_s is not None:
        used_before_s = min(used_before_s, budget.used_before_s)
    return replace(budget, used_before_s=used_before_s)


def foresee(census: Census, budget: Budget) -> Swept:
    """What a sweep of the cache so counted would delete."""
    budget = _with_grace(budget, census.root, GRACE_S)
    return _swept(census, evictions(census, budget), budget, applied=False)


def evictions(census: Census, budget: Budget) -> NDArray[np.int64]:
    """Numbers of the entries to delete, the least recently used first."""
    sizes = np.asarray(census.sizes)
    uses = np.asarray(census.uses_ns)
    free = np.asarray(census.kept) == 0
    if budget.used_before_s is not None:
        free &= uses < int(budget.used_before_s * 1e9)
    excess = int(sizes.sum()) - budget.max_bytes
    if excess <= 0:
        return np.empty(0, np.int64)
    order = np.argsort(uses, kind="stable")
    order = order[free[order]]
    count = int(np.searchsorted(np.cumsum(sizes[order]), excess)) + 1
    return order[:count]


def _delete(census: Census, going: NDArray[np.int64]) -> NDArray[np.int64]:
    """Delete these entries; gives those of them that are gone now."""
    medium, gone = medium_of(census.root), []
    for number in map(int, going):
        name = entry_name(census.tower(number), census.key(number))
        if not isinstance(census.root, Path):  # no lock: it may have been used since it was counted
            found = medium.state(name)
            if found is None or found.st_mtime_ns > census.uses_ns[number]:
                continue
        medium.delete(name)
        gone.append(number)
    return np.asarray(gone, np.int64)


def _swept(census: Census, going: NDArray[np.int64], budget: Budget, applied: bool) -> Swept:
    sizes = np.asarray(census.sizes)
    left = np.ones(census.entries, bool)
    left[going] = False
    uses = np.asarray(census.uses_ns)[left]
    evicted_bytes = int(sizes[going].sum())
    return Swept(
        applied=applied,
        entries=census.entries,
        bytes=census.bytes,
        evicted=len(going),
        evicted_bytes=evicted_bytes,
        kept=sum(census.kept),
        oldest_left_s=round(int(uses.min()) / 1e9, 3) if len(uses) else None,
        over_budget_bytes=max(0, census.bytes - evicted_bytes - budget.max_bytes),
    )
