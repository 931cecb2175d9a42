"""Which format versions this program may touch."""

from __future__ import annotations

import re

from pipeline.errors import StoreError
from pipeline.store.layout import FORMAT_VERSION
from pipeline.store.location import Location
from pipeline.store.media import medium_of
from pipeline.store.medium import Medium

_VERSION = re.compile(r"v([0-9]+)")


def refuse_newer(root: Location) -> tuple[str, ...]:
    """Look which format versions lie in the cache; a sentence for each older one.

    Raises StoreError for a newer one: what it holds and who still writes it is not known here.
    An older one is left alone.
    """
    return _older(medium_of(root))


def require_cache(root: Location) -> tuple[str, ...]:
    """`refuse_newer` of a cache that must be there; raises StoreError if it is not."""
    medium = medium_of(root)
    if not medium.is_there():
        raise StoreError(
            f"there is no cache `{root}`", "`pipeline encode PATH` makes one; check `--cache DIR`"
        )
    return _older(medium)


def _older(medium: Medium) -> tuple[str, ...]:
    older = []
    for name in medium.top():
        found = _VERSION.fullmatch(name)
        if found is None or int(found[1]) == FORMAT_VERSION:
            continue
        if int(found[1]) > FORMAT_VERSION:
            raise StoreError(
                f"`{medium.address(name)}` was written by a newer version of this program, which "
                f"knows up to format {FORMAT_VERSION}",
                "upgrade this program, or choose another directory with `--cache DIR`",
            )
        older.append(
            f"`{medium.address(name)}` is of an older format and left alone; it can be deleted"
        )
    return tuple(older)
