"""Names below `cache/`, and which format versions this program may touch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pipeline.errors import StoreError

FORMAT_VERSION = 1
DOCUMENTS = "documents"
QUARANTINE = "quarantine"
LOCK = "lock"

_VERSION = re.compile(r"v([0-9]+)")


def version_directory(root: Path) -> Path:
    """Where entries and manifests of this format lie."""
    return root / f"v{FORMAT_VERSION}"


def refuse_newer(root: Path) -> tuple[str, ...]:
    """Look which format versions lie in the cache; a sentence for each older one.

    Raises StoreError for a newer one: what it holds and who still writes it is not known here.
    An older one is left alone.
    """
    try:
        names = sorted(os.listdir(root))
    except OSError:  # not there yet, or whoever reads or writes it next says why
        return ()
    older = []
    for name in names:
        found = _VERSION.fullmatch(name)
        if found is None or int(found[1]) == FORMAT_VERSION:
            continue
        if int(found[1]) > FORMAT_VERSION:
            raise StoreError(
                f"`{root / name}` was written by a newer version of this program, which knows "
                f"up to format {FORMAT_VERSION}",
                "upgrade this program, or choose another directory with `--cache DIR`",
            )
        older.append(f"`{root / name}` is of an older format and left alone; it can be deleted")
    return tuple(older)


def require_cache(root: Path) -> tuple[str, ...]:
    """`refuse_newer` of a cache that must be there; raises StoreError if it is not."""
    if not root.is_dir():
        raise StoreError(
            f"there is no cache `{root}`", "`pipeline encode PATH` makes one; check `--cache DIR`"
        )
    return refuse_newer(root)
