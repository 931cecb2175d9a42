"""The embedding cache: put, get, has, verify; nothing else knows a path below `cache/`.

The on-disk format is described in `cache/README.md`.
"""

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
