"""Find the cache entry of a page without decoding it, and without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.encode.digests import Digests
from pipeline.encode.reading import named, no_such_page
from pipeline.encode.records import Target
from pipeline.encode.stages import too_narrow
from pipeline.errors import Failure, Reason, Stage
from pipeline.geometry import AspectRatioError
from pipeline.keys import cache_key
from pipeline.memo import Memo, state_of
from pipeline.pages.records import Refused
from pipeline.pages.sources import source_stat
from pipeline.store import Footer, Manifest, PageRecord


@dataclass(frozen=True, slots=True)
class Located:
    """The entry of a page; `partial` if the page is what is left of one that is cut off."""

    footer: Footer
    partial: bool


class Locator:
    """File → digest → manifest → key → footer; digests are kept while a file is as it was."""

    def __init__(self, target: Target, memo: Memo | None = None) -> None:
        self._store = target.store
        self._spec = target.spec
        self._render = target.render
        self._memo = memo or Memo(None)
        self._digests = Digests(self._memo)
        self._names: dict[Path, tuple[str, tuple[str, str]]] = {}

    def locate(self, path: Path, page: int) -> Located | Failure | None:
        """The entry of page `page` (from 1) of a file; None if it must be encoded first.

        A Failure tells that it can't be: the file is gone, or was found bad when it was encoded.
        An entry that is not usable is quarantined, and so a miss.
        """
        try:
            name = self._name(path)
        except FileNotFoundError:
            return Failure(str(path), page, Stage.READ, Reason.NOT_FOUND, "no such file")
        except OSError as error:
            detail = error.strerror or str(error)
            return Failure(str(path), page, Stage.READ, Reason.UNREADABLE, detail, retryable=True)
        except Refused as refused:
            return refused.as_failure(path, page)
        manifest = self._store.manifest(*name)
        if manifest is None:
            return None
        record = _page_of(manifest, path, page)
        return record if isinstance(record, Failure) else self._entry(record, path)

    def remember(self) -> None:
        """Write down what was learned of files, for the next one."""
        self._memo.flush()

    def _name(self, path: Path) -> tuple[str, str]:
        """What the manifest of a file is found by."""
        state = state_of(source_stat(path))
        known = self._names.get(path)
        if known is None or known[0] != state:
            found = self._digests.of(path)
            name = found.digest, self._render.digest(found.kind)
            known = self._names[path] = found.state, name
        return known[1]

    def _entry(self, record: PageRecord, path: Path) -> Located | Failure | None:
        try:
            placed = self._spec.geometry.place(record.height_px, record.width_px)
        except AspectRatioError as error:
            return too_narrow(path, record.page, error)
        key = cache_key(record.pixels, self._spec, self._store.tower_fingerprint)
        footer = self._store.footer(key)
        if footer is not None and (footer.grid, footer.rows) == (placed.grid, placed.tokens):
            return Located(footer, record.partial)
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
