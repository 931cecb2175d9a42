"""From a cache's location to its files."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.store.disk import Disk
from pipeline.store.location import Location, Remote
from pipeline.store.medium import Access, Medium

if TYPE_CHECKING:
    from pipeline.store.objects import Objects


def medium_of(location: Location) -> Medium:
    """The files below a cache; nothing is looked up yet.

    Raises MissingExtraError if what opens its URL is not installed.
    """
    return Disk(location) if isinstance(location, Path) else _objects(location.url, os.getpid())


def access_to(location: Location) -> Access:
    """The same for whoever uses entries: read through the local tier, if there is one."""
    if not isinstance(location, Remote) or location.tier is None:
        return medium_of(location)
    from pipeline.store.tier import TierFiles
    from pipeline.store.tiered import Tiered

    tier = location.tier
    return Tiered(medium_of(location), TierFiles(tier.directory, tier.max_bytes))


@lru_cache
def _objects(url: str, process: int) -> Objects:
    """One for each process: it knows what it has listed, and its connections can't be shared."""
    from pipeline.store.objects import Objects

    return Objects(url)
