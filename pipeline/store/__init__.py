"""The embedding cache: put, get, has, verify; nothing else knows a path below `cache/`.

The on-disk format is described in `cache/README.md`. Names are imported when they are first asked
for: a rerun that finds every page in the cache needs neither numpy nor what an entry consists of.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.store.documents import Manifest, PageRecord
    from pipeline.store.entry import BadEntry, Compression, Entry, Footer
    from pipeline.store.location import Location, Remote, Tier, location_of
    from pipeline.store.shelf import Store

__all__ = [
    "BadEntry",
    "Compression",
    "Entry",
    "Footer",
    "Location",
    "Manifest",
    "PageRecord",
    "Remote",
    "Store",
    "Tier",
    "location_of",
]

_MODULES = {
    "documents": ("Manifest", "PageRecord"),
    "entry": ("BadEntry", "Compression", "Entry", "Footer"),
    "location": ("Location", "Remote", "Tier", "location_of"),
    "shelf": ("Store",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
