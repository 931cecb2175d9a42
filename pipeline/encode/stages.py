"""The stages of line 1 from a page on, generators; what failed or is done passes through."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import __version__
from pipeline.encode.machine import physical_cores, prepare_process
from pipeline.encode.records import (
    Done,
    Encoded,
    PageRead,
    Placed,
    PutOff,
    Resized,
    Target,
)
from pipeline.errors import Failure, Reason, Stage
from pipeline.families import Tower
from pipeline.geometry import AspectRatioError
from pipeline.keys import cache_key
from pipeline.store import Entry, Store
from pipeline.store.claims import Claims

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


# ---------------------------------------------------------------- place, look up


def place(
    pages: Iterable[PageRead | Failure | PutOff], target: Target
) -> Iterator[Placed | Failure | PutOff]:
    """Each page with its size in the model, its grid and its cache key."""
    fingerprint = target.store.tower_fingerprint
    for page in pages:
        if not isinstance(page, PageRead):
            yield page
            continue
        try:
            placement = target.spec.geometry.place(page.height_px, page.width_px)
        except AspectRatioError as error:
            yield too_narrow(page.file.path, page.page, error)
            continue
        key = cache_key(page.pixels, target.spec, fingerprint)
        yield Placed(page, key, placement)


def too_narrow(path: Path, page: int, error: AspectRatioError) -> Failure:
    """The failure of a page that the processor refuses for its aspect ratio."""
    return Failure(str(path), page, Stage.RESIZE, Reason.ASPECT_RATIO, str(error))


def look_up(
    pages: Iterable[Placed | Failure | PutOff], store: Store, claims: Claims
) -> Iterator[Placed | Done | Failure | PutOff]:
    """Pages whose embedding is in the cache are done; others are claimed, or put off."""
    for page in pages:
        if not isinstance(page, Placed):
            yield page
        elif store.has(page.key):
            yield _done(page, None)
        elif page.read.rgb is None or not claims.take(page.key):
            yield PutOff(page.read.file, page.read.page, page.key)
        else:
            yield page


def _done(page: Placed, stored_bytes: int | None) -> Done:
    placement = page.placement
    pixels = placement.height_px * placement.width_px
    return Done(page.read.file, page.read.page, page.key, placement.tokens, pixels, stored_bytes)


# ---------------------------------------------------------------- resize, encode, store


def resize(
    pages: Iterable[Placed | Done | Failure | PutOff], target: Target, claims: Claims
) -> Generator[Resized | Done | Failure | PutOff, None, None]:
    """Pages that must be encoded, as the tower takes them."""
    for page in pages:
        if not isinstance(page, Placed):
            yield page
            continue
        resized = _resized(page, target)
        if isinstance(resized, Failure):
            claims.drop(page.key)
        yield resized


def _resized(page: Placed, target: Target) -> Resized | Failure:
    assert page.read.rgb is not None, page.key
    try:
        rgb = target.family.resize(page.read.rgb, page.placement, target.spec)
    except (RuntimeError, MemoryError) as error:
        return _tower_error(page, error)
    return Resized(page, rgb)


def _tower_error(page: Placed, error: Exception) -> Failure:
    """The failure of a page for which torch lacks memory, or that it can't compute."""
    detail = (str(error) or type(error).__name__).splitlines()[0]
    file, number = str(page.read.file.path), page.read.page
    return Failure(file, number, Stage.ENCODE, Reason.TOWER_ERROR, detail, retryable=True)


class TowerAtHand:
    """The target's tower, loaded when it is first needed."""

    def __init__(self, target: Target, threads: int | None) -> None:
        self._target = target
        self._threads = threads
        self._tower: Tower | None = None

    def encode(self, page: Resized) -> Encoded | Failure:
        """The page with its embedding."""
        if self._tower is None:
            prepare_process(self._threads or physical_cores())
            target = self._target
            self._tower = target.family.load_tower(target.model, target.spec.precision)
        return _embedded(page, self._tower, self._target)


def run_tower(
    pages: Iterable[Resized | Done | Failure | PutOff],
    tower: TowerAtHand,
    store: Store,
    claims: Claims,
) -> Iterator[Encoded | Done | Failure | PutOff]:
    """Embeddings of the pages that must be encoded."""
    for page in pages:
        if not isinstance(page, Resized):
            yield page
        elif store.has(page.placed.key):  # an equal page has been encoded since it was sought
            claims.drop(page.placed.key)
            yield _done(page.placed, None)
        else:
            encoded = tower.encode(page)
            if isinstance(encoded, Failure):
                claims.drop(page.placed.key)
            yield encoded


def _embedded(page: Resized, tower: Tower, target: Target) -> Encoded | Failure:
    read, placement = page.placed.read, page.placed.placement
    try:
        bits = _bfloat16_bits(tower.encode(page.rgb))
    except (RuntimeError, MemoryError) as error:
        return _tower_error(page.placed, error)
    if len(bits) != placement.tokens:  # vLLM would count otherwise than the tower did
        detail = f"the tower gave {len(bits)} rows, {placement.tokens} were expected"
        return Failure(str(read.file.path), read.page, Stage.ENCODE, Reason.TOWER_ERROR, detail)
    entry = Entry.from_bits(
        bits,
        key=page.placed.key,
        spec=target.spec,
        tower_fingerprint=target.store.tower_fingerprint,
        grid=placement.grid,
        source_size=(read.height_px, read.width_px),
        tiles=placement.tiles,
        made_by=_made_by(target),
    )
    if not entry.footer.finite:
        detail = "the tower's output holds values that are not finite"
        return Failure(str(read.file.path), read.page, Stage.ENCODE, Reason.NOT_FINITE, detail)
    return Encoded(page.placed, entry)


def _bfloat16_bits(rows: torch.Tensor) -> NDArray[np.uint16]:
    """Rounded to bfloat16 (to nearest, ties to even), as uint16 of the same shape."""
    import torch

    bits: NDArray[np.uint16] = rows.to(torch.bfloat16).view(torch.uint16).numpy()
    return bits


def _made_by(target: Target) -> str:
    """Versions and commit, for people who look into an entry; no part of any key."""
    libraries = " ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    commit = f" commit {target.model.revision}" if target.model.revision else ""
    return f"pipeline {__version__} {libraries} model {target.model.name}{commit}"


def put(
    pages: Iterable[Encoded | Done | Failure | PutOff], store: Store, claims: Claims
) -> Iterator[Done | Failure | PutOff]:
    """Embeddings written to the cache; a write that fails raises StoreError."""
    for page in pages:
        if not isinstance(page, Encoded):
            yield page
            continue
        done = _done(page.placed, store.put(page.entry))
        claims.drop(page.placed.key)
        yield done
