"""Find the cache entry of a page without decoding it, and without torch."""

from __future__ import annotations

from pathlib import Path

from pipeline.encode.reading import file_state, named, no_such_page
from pipeline.encode.stages import too_narrow
from pipeline.errors import Failure, Reason, Stage
from pipeline.geometry import AspectRatioError
from pipeline.keys import EncodeSpec, RenderSpec, cache_key, file_digest
from pipeline.store import Footer, Manifest, PageRecord, Store


class Locator:
    """File → digest → manifest → key → footer; file digests are kept while the file is as it was.

    `spec` and `dpi` are those of the `Target` that pages are encoded for.
    """

    def __init__(self, store: Store, spec: EncodeSpec, dpi: int) -> None:
        self._store = store
        self._spec = spec
        self._render_digest = RenderSpec(spec.rules, dpi).digest()
        self._digests: dict[Path, tuple[tuple[int, int], str]] = {}

    def locate(self, path: Path, page: int) -> Footer | Failure | None:
        """The entry of page `page` (from 1) of a file; None if it must be encoded first.

        A Failure tells that it can't be: the file is gone, or was found bad when it was encoded.
        An entry that is not usable is quarantined, and so a miss.
        """
        try:
            digest = self._digest(path)
        except FileNotFoundError:
            return Failure(str(path), page, Stage.READ, Reason.NOT_FOUND, "no such file")
        except OSError as error:
            detail = error.strerror or str(error)
            return Failure(str(path), page, Stage.READ, Reason.UNREADABLE, detail, retryable=True)
        manifest = self._store.manifest(digest, self._render_digest)
        if manifest is None:
            return None
        record = _page_of(manifest, path, page)
        return record if isinstance(record, Failure) else self._entry(record, path)

    def _digest(self, path: Path) -> str:
        state = file_state(path)
        known = self._digests.get(path)
        if known is None or known[0] != state:
            known = self._digests[path] = (state, file_digest(path))
        return known[1]

    def _entry(self, record: PageRecord, path: Path) -> Footer | Failure | None:
        try:
            placed = self._spec.geometry.place(record.height_px, record.width_px)
        except AspectRatioError as error:
            return too_narrow(path, record.page, error)
        key = cache_key(record.pixels, self._spec, self._store.tower_fingerprint)
        footer = self._store.footer(key)
        if footer is not None and (footer.grid, footer.rows) == (placed.grid, placed.tokens):
            return footer
        if self._store.has(key):
            self._store.quarantine(key, "its footer can't be used for the page that it was made of")
        return None


def _page_of(manifest: Manifest, path: Path, page: int) -> PageRecord | Failure:
    for record in manifest.pages:
        if isinstance(record, Failure) and record.page in (None, page):
            return named(record, path)
        if isinstance(record, PageRecord) and record.page == page:
            return record
    return no_such_page(path, page, len(manifest.pages))
