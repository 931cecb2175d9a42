"""What an object store held when it was listed, so that a rerun need not ask for each page."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.store.medium import Listed


@dataclass(frozen=True, slots=True)
class _Listing:
    """Files of a directory: hashes of their names in order, and last uses in ns.

    64 bits tell a few thousand names apart, and take 16 bytes for a file.
    """

    hashes: NDArray[np.int64]
    uses_ns: NDArray[np.int64]

    def place(self, name: str) -> int | None:
        wanted = hash(name)
        place = int(np.searchsorted(self.hashes, wanted))
        there = place < len(self.hashes) and self.hashes[place] == wanted
        return place if there else None


class Presence:
    """Each directory as of its first look-up by this process, and what the process did since.

    A file that is named here was there then; one that is not may have come since.
    """

    def __init__(self, list_directory: Callable[[str], list[Listed]]) -> None:
        self._list = list_directory
        self._listings: dict[str, _Listing] = {}
        self._written: dict[str, int] = {}
        self._gone: set[str] = set()

    def last_use_ns(self, name: str) -> int | None:
        """When a file was last used, as far as is known; None if it was not there.

        Lists its directory at first.
        """
        if name in self._written:
            return self._written[name]
        if name in self._gone:
            return None
        listing = self._listing(name.rpartition("/")[0])
        place = listing.place(name)
        return None if place is None else int(listing.uses_ns[place])

    def used(self, name: str) -> None:
        """A file is there, and its last use is noted as of now."""
        listing = self._listings.get(name.rpartition("/")[0])
        place = None if listing is None or name in self._gone else listing.place(name)
        if listing is not None and place is not None:
            listing.uses_ns[place] = time.time_ns()
        else:
            self._written[name] = time.time_ns()
            self._gone.discard(name)

    def gone(self, name: str) -> None:
        """A file is there no more."""
        self._written.pop(name, None)
        self._gone.add(name)

    def is_listed(self, name: str) -> bool:
        """True if the directory of a file was listed before."""
        return name.rpartition("/")[0] in self._listings

    def _listing(self, directory: str) -> _Listing:
        found = self._listings.get(directory)
        if found is None:
            files = sorted(
                (hash(f"{directory}/{each.name}"), 0 if not each.state else each.state.st_mtime_ns)
                for each in self._list(directory)
                if not each.is_directory
            )
            columns = np.asarray(files, np.int64).reshape(-1, 2)
            found = _Listing(columns[:, 0].copy(), columns[:, 1].copy())
            self._listings[directory] = found
        return found
