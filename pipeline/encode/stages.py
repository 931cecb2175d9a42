"""The stages of line 1, each a generator over pages; failures and finished pages pass through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import __version__
from pipeline.encode.records import (
    Document,
    Done,
    Encoded,
    Only,
    PageRead,
    Placed,
    Resized,
    Target,
)
from pipeline.errors import Failure, Reason, Stage
from pipeline.families import Tower
from pipeline.geometry import AspectRatioError
from pipeline.keys import cache_key, file_digest, pixel_digest
from pipeline.pages import Page, SourceFile, decode_pages
from pipeline.store import Entry, Manifest, PageRecord, Store

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


def file_state(path: Path) -> tuple[int, int]:
    """(size, mtime in ns): a file in another state holds other bytes; raises OSError."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def digest_files(files: Iterable[SourceFile]) -> Iterator[Document | Failure]:
    """Each file with the digest of its bytes."""
    for file in files:
        try:
            state = file_state(file.path)
            yield Document(file, file_digest(file.path), state)
        except OSError as error:
            yield _unreadable(file, error.strerror or str(error))


def _unreadable(file: SourceFile, detail: str) -> Failure:
    return Failure(str(file.path), None, Stage.READ, Reason.UNREADABLE, detail, retryable=True)


# ---------------------------------------------------------------- read


def read_pages(
    documents: Iterable[Document | Failure], target: Target, only: Only | None
) -> Iterator[PageRead | Failure]:
    """The wanted pages of each file, in order: known from its manifest, or else decoded.

    Of a file with a manifest only the pages without an embedding are decoded; of one without,
    all are, so that its manifest can be written.
    """
    for document in documents:
        if isinstance(document, Failure):
            yield document
            continue
        wanted = None if only is None else only.get(document.file.path)
        manifest = target.store.manifest(document.digest, target.render.digest())
        found: list[PageRecord | Failure] = []
        for page, rgb_page in _pages(document.file, manifest, target, wanted):
            found.append(page)
            if wanted is None or page.page is None or page.page in wanted:
                yield _as_read(document.file, page, rgb_page)
        yield from _never_seen(document.file, found, wanted)
        yield from _keep_manifest(document, found, target)


def _pages(
    file: SourceFile, manifest: Manifest | None, target: Target, wanted: frozenset[int] | None
) -> Iterator[tuple[PageRecord | Failure, Page | None]]:
    """Every page of the file as a record, with its pixels where it was decoded."""
    if manifest is None:
        for page in decode_pages(file, dpi=target.dpi):
            yield _recorded(page)
        return
    missing = frozenset(
        record.page
        for record in manifest.pages
        if isinstance(record, PageRecord)
        and (wanted is None or record.page in wanted)
        and _needs_pixels(record, target)
    )
    decoded = decode_pages(file, dpi=target.dpi, only=missing) if missing else iter(())
    for record in manifest.pages:
        if record.page not in missing:
            yield record, None
            continue
        page = next(decoded)
        yield _recorded(page)
        if page.page is None:  # the file as a whole can't be opened any more
            return


def _needs_pixels(record: PageRecord, target: Target) -> bool:
    """True if the page must be encoded: it can be, and the cache does not have it."""
    try:
        target.spec.geometry.place(record.height_px, record.width_px)
    except AspectRatioError:
        return False
    store = target.store
    return not store.has(cache_key(record.pixels, target.spec, store.tower_fingerprint))


def _recorded(page: Page | Failure) -> tuple[PageRecord | Failure, Page | None]:
    if isinstance(page, Failure):
        return page, None
    height_px, width_px, _ = page.rgb.shape
    return PageRecord(page.page, pixel_digest(page.rgb), height_px, width_px), page


def _as_read(
    file: SourceFile, record: PageRecord | Failure, page: Page | None
) -> PageRead | Failure:
    if isinstance(record, Failure):
        return named(record, file.path)
    rgb = None if page is None else page.rgb
    return PageRead(file, record.page, record.pixels, record.height_px, record.width_px, rgb)


def named(failure: Failure, path: Path) -> Failure:
    """A manifest's failure, with the file's present name."""
    return Failure(str(path), failure.page, failure.stage, failure.reason, failure.detail)


def _never_seen(
    file: SourceFile, found: list[PageRecord | Failure], wanted: frozenset[int] | None
) -> Iterator[Failure]:
    """A failure for each wanted page beyond the last; none if the whole file failed."""
    if all(page.page is not None for page in found):
        for number in sorted((wanted or frozenset()) - {page.page for page in found}):
            yield no_such_page(file.path, number, len(found))


def no_such_page(path: Path, number: int, count: int) -> Failure:
    """The failure of a page that the file does not have."""
    detail = f"the file has {count} page{'s' if count != 1 else ''}"
    return Failure(str(path), number, Stage.DECODE, Reason.NO_SUCH_PAGE, detail)


def _keep_manifest(
    document: Document, found: list[PageRecord | Failure], target: Target
) -> Iterator[Failure]:
    """Write what the file holds, unless it changed meanwhile or could not be read at all."""
    try:
        changed = file_state(document.file.path) != document.state
    except OSError as error:
        yield _unreadable(document.file, error.strerror or str(error))
        return
    if changed:
        yield _unreadable(document.file, "the file changed while it was read")
    elif all(isinstance(page, PageRecord) or page.stage is Stage.DECODE for page in found):
        manifest = Manifest(document.file.paged, tuple(_nameless(page) for page in found))
        target.store.put_manifest(document.digest, target.render.digest(), manifest)


def _nameless(page: PageRecord | Failure) -> PageRecord | Failure:
    if isinstance(page, PageRecord):
        return page
    return Failure(None, page.page, page.stage, page.reason, page.detail)


# ---------------------------------------------------------------- place, look up


def place(pages: Iterable[PageRead | Failure], target: Target) -> Iterator[Placed | Failure]:
    """Each page with its size in the model, its grid and its cache key."""
    fingerprint = target.store.tower_fingerprint
    for page in pages:
        if isinstance(page, Failure):
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


def look_up(pages: Iterable[Placed | Failure], store: Store) -> Iterator[Placed | Done | Failure]:
    """Pages whose embedding is in the cache are done."""
    for page in pages:
        if isinstance(page, Placed) and (page.read.rgb is None or store.has(page.key)):
            yield _done(page, None)
        else:
            yield page


def _done(page: Placed, stored_bytes: int | None) -> Done:
    placement = page.placement
    pixels = placement.height_px * placement.width_px
    return Done(page.read.file, page.read.page, page.key, placement.tokens, pixels, stored_bytes)


# ---------------------------------------------------------------- resize, encode, store


def resize(
    pages: Iterable[Placed | Done | Failure], target: Target
) -> Iterator[Resized | Done | Failure]:
    """Pages that must be encoded, as the tower takes them."""
    for page in pages:
        yield _resized(page, target) if isinstance(page, Placed) else page


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


def run_tower(
    pages: Iterable[Resized | Done | Failure], target: Target
) -> Iterator[Encoded | Done | Failure]:
    """Embeddings of the pages that must be encoded; the tower is loaded at the first of them."""
    tower: Tower | None = None
    for page in pages:
        if not isinstance(page, Resized):
            yield page
            continue
        if tower is None:
            tower = target.family.load_tower(target.model, target.spec.precision)
        yield _embedded(page, tower, target)


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


def put(pages: Iterable[Encoded | Done | Failure], store: Store) -> Iterator[Done | Failure]:
    """Embeddings written to the cache; a write that fails raises StoreError."""
    for page in pages:
        yield _done(page.placed, store.put(page.entry)) if isinstance(page, Encoded) else page
