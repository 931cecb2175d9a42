"""Delete entries down to a budget, the least recently used first."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.store.census import Census, take_census
from pipeline.store.files import write_error
from pipeline.store.hold import hold_alone
from pipeline.store.shelf import Store


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
    root: Path,
    budget: Budget,
    *,
    needed: Callable[[], Collection[str]] = _nothing,
    apply: bool = False,
) -> Swept:
    """Bring the cache `root` within its budget, or with `apply` False only say what would go.

    `needed` gives the keys that must stay; it is asked once nobody else uses the cache. Raises
    LockedError while an encoder or a run does, StoreError where an entry can't be deleted.
    """
    with hold_alone(root) if apply else nullcontext():
        census = take_census(root, frozenset(needed()))
        going = evictions(census, budget)
        if apply:
            for number in map(int, going):
                _delete(Store(root, census.tower(number)).path(census.key(number)))
    return _swept(census, going, budget, apply)


def foresee(census: Census, budget: Budget) -> Swept:
    """What a sweep of the cache so counted would delete."""
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


def _delete(path: Path) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise write_error(path, error) from error


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
