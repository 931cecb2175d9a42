"""The embedding cache: put, get, has, verify; nothing else knows a path below `cache/`.

The on-disk format is described in `cache/README.md`.
"""

from pipeline.store.documents import Manifest, PageRecord
from pipeline.store.entry import BadEntry, Entry, Footer
from pipeline.store.shelf import Problem, Store

__all__ = ["BadEntry", "Entry", "Footer", "Manifest", "PageRecord", "Problem", "Store"]
