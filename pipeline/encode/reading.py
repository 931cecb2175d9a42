"""The first stages of line 1: files are digested, and their pages read or remembered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.encode.digests import Digests
from pipeline.encode.records import Document, Only, PageRead, PutOff, Target
from pipeline.errors import Failure, Reason, Stage
from pipeline.geometry import AspectRatioError
from pipeline.keys import cache_key, pixel_digest
from pipeline.memo import state_of
from pipeline.pages import Page, PageRanges, SourceFile, Wanted
from pipeline.pages.decoders import Decoders
from pipeline.pages.records import Refused
from pipeline.pages.requests import DecodeRequest
from pipeline.pages.sources import source_stat
from pipeline.store import Manifest, PageRecord
from pipeline.store.claims import Claims


def digest_files(files: Iterable[SourceFile], digests: Digests) -> Iterator[Document | Failure]:
    """Each file with the digest of its bytes."""
    for file in files:
        try:
            found = digests.of(file.path)
            yield Document(file, found.digest, found.state)
        except OSError as error:
            yield _unreadable(file, error.strerror or str(error))
        except Refused as refused:
            yield refused.as_failure(file.path, None)


def _unreadable(file: SourceFile, detail: str) -> Failure:
    return Failure(str(file.path), None, Stage.READ, Reason.UNREADABLE, detail, retryable=True)


@dataclass(frozen=True, slots=True)
class _Known:
    """A document with what the cache knows of it; of its pages, `missing` must be decoded.

    `claim` is what to let others have once its pages are read.
    """

    document: Document
    manifest: Manifest | None
    wanted: Wanted | None
    missing: frozenset[int]
    claim: str | None


def read_pages(
    documents: Iterable[Document | Failure],
    target: Target,
    only: Only | None,
    claims: Claims,
    *,
    put_off: bool = True,
) -> Iterator[PageRead | Failure | PutOff]:
    """The wanted pages of each file, in order: known from its manifest, or else decoded.

    Of a file with a manifest only the pages without an embedding are decoded; of one without,
    all are, so that its manifest can be written (but with ranges of pages, only those). What
    another encoder has claimed is put off; without `put_off`, single pages only.
    """
    with Decoders(target.decode.processes, target.decode.limits) as decoders:
        for known, decoded in decoders.ahead(_look_up(documents, target, only, claims, put_off)):
            if not isinstance(known, _Known):
                yield known
                continue
            document, wanted = known.document, known.wanted
            found: list[PageRecord | Failure] = []
            for page, rgb_page in _pages(known, decoded):
                found.append(page)
                if wanted is None or page.page is None or page.page in wanted:
                    yield _as_read(document.file, page, rgb_page)
            yield from _never_seen(document.file, found, wanted)
            if (fault := _changed(document)) is not None:
                yield fault
            elif known.missing or (known.manifest is None and not isinstance(wanted, PageRanges)):
                _keep_manifest(document, found, target)
            if known.claim is not None:
                claims.drop(known.claim)


def _look_up(
    documents: Iterable[Document | Failure],
    target: Target,
    only: Only | None,
    claims: Claims,
    put_off: bool,
) -> Iterator[tuple[_Known | Failure | PutOff, DecodeRequest | None]]:
    """Each document as the cache knows it, with the pages to decode."""
    for document in documents:
        if isinstance(document, Failure):
            yield document, None
            continue
        file = document.file
        wanted: Wanted | None = target.decode.pages if only is None else only.get(file.path)
        manifest = target.store.manifest(document.digest, target.render.digest(file.kind))
        missing = frozenset[int]()
        pages: Wanted | None = None if isinstance(wanted, frozenset) else wanted
        if manifest is not None:
            pages = missing = _to_decode(manifest, wanted, target, claims)
            if not missing:
                yield _Known(document, manifest, wanted, missing, None), None
                continue
        claim = (
            f"{target.store.tower_fingerprint} {target.render.digest(file.kind)} {document.digest}"
        )
        if put_off and not claims.take(claim):
            yield PutOff(file, None), None
            continue
        request = DecodeRequest(file, target.render, pages, target.decode.passwords)
        yield _Known(document, manifest, wanted, missing, claim if put_off else None), request


def _pages(
    known: _Known, decoded: Iterator[Page | Failure]
) -> Iterator[tuple[PageRecord | Failure, Page | None]]:
    """Every page of the file as a record, with its pixels where it was decoded."""
    if known.manifest is None:
        yield from map(_recorded, decoded)
        return
    for record in known.manifest.pages:
        if record.page not in known.missing:
            yield record, None
            continue
        page = next(decoded)
        yield _recorded(page)
        if page.page is None:  # the file as a whole can't be opened any more
            break
    for _ in decoded:  # nothing is left but the word that this was all
        pass


def _to_decode(
    manifest: Manifest, wanted: Wanted | None, target: Target, claims: Claims
) -> frozenset[int]:
    """The wanted pages that have no embedding, but for those that another encoder works on."""
    return frozenset(
        record.page
        for record in manifest.pages
        if isinstance(record, PageRecord)
        and (wanted is None or record.page in wanted)
        and _needs_pixels(record, target, claims)
    )


def _needs_pixels(record: PageRecord, target: Target, claims: Claims) -> bool:
    """True if the page must be encoded here: it can be, and nobody has it or makes it."""
    try:
        target.spec.geometry.place(record.height_px, record.width_px)
    except AspectRatioError:
        return False
    key = cache_key(record.pixels, target.spec, target.store.tower_fingerprint)
    return not target.store.has(key) and claims.is_free(key)


def _recorded(page: Page | Failure) -> tuple[PageRecord | Failure, Page | None]:
    if isinstance(page, Failure):
        return page, None
    return page_record(page), page


def page_record(page: Page) -> PageRecord:
    """What a manifest keeps of a decoded page."""
    height_px, width_px, _ = page.rgb.shape
    return PageRecord(page.page, pixel_digest(page.rgb), height_px, width_px, page.partial)


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
    file: SourceFile, found: list[PageRecord | Failure], wanted: Wanted | None
) -> Iterator[Failure]:
    """A failure for each page asked for beyond the last; none if the whole file failed."""
    if isinstance(wanted, frozenset) and all(page.page is not None for page in found):
        for number in sorted(wanted - {page.page for page in found}):
            yield no_such_page(file.path, number, len(found))


def no_such_page(path: Path, number: int, count: int) -> Failure:
    """The failure of a page that the file does not have."""
    detail = f"the file has {count} page{'s' if count != 1 else ''}"
    return Failure(str(path), number, Stage.DECODE, Reason.NO_SUCH_PAGE, detail)


def _changed(document: Document) -> Failure | None:
    """The failure of a file that is not what it was when it was digested."""
    try:
        same = state_of(source_stat(document.file.path)) == document.state
    except OSError as error:
        return _unreadable(document.file, error.strerror or str(error))
    return None if same else _unreadable(document.file, "the file changed while it was read")


def _keep_manifest(document: Document, found: list[PageRecord | Failure], target: Target) -> None:
    """Write what the file holds, unless that may be another thing the next time."""
    if found and not any(isinstance(page, Failure) and _may_change(page) for page in found):
        manifest = Manifest(document.file.paged, tuple(_nameless(page) for page in found))
        digest = target.render.digest(document.file.kind)
        target.store.put_manifest(document.digest, digest, manifest)


def _may_change(failure: Failure) -> bool:
    """True for what was the machine's fault, or can be mended by a password."""
    return failure.retryable or failure.reason is Reason.ENCRYPTED


def _nameless(page: PageRecord | Failure) -> PageRecord | Failure:
    if isinstance(page, PageRecord):
        return page
    return Failure(None, page.page, page.stage, page.reason, page.detail)
