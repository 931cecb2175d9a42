"""Entries and manifests of a cache elsewhere, read through a directory of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.store.medium import DamagedError, FileState, Medium, T
from pipeline.store.tier import TierFiles


@dataclass(frozen=True, slots=True)
class Tiered:
    """See `Access`. Only the cache itself says what it has; what it lost is made again."""

    cache: Medium
    tier: TierFiles

    def has(self, name: str) -> bool:
        return self.cache.has(name)

    def load(self, name: str, parse: Callable[[bytes], T], last: int | None = None) -> T:
        near = self.tier.read(name, last)
        if near is not None:
            try:
                return parse(near)
            except DamagedError:  # says nothing of the cache's own copy
                self.tier.drop(name)
        if last is not None:
            return self.cache.load(name, parse, last)
        data = self.cache.read(name)
        found = parse(data)
        self.tier.keep(name, data)
        return found

    def write(self, name: str, data: bytes | memoryview, *, once: bool = True) -> None:
        self.cache.write(name, data, once=once)
        self.tier.keep(name, data, time.time_ns())

    def set_aside(self, name: str, why: str) -> str | None:
        self.tier.drop(name)
        return self.cache.set_aside(name, why)

    def note_use(self, name: str, known: FileState | None = None) -> None:
        if self.tier.is_to_be_told(name):
            self.cache.note_use(name, known)
