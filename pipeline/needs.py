"""From pages back to the cache: which entries a job needs, where one page's entry lies and why."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.encode import Located, Target
from pipeline.encode.reading import page_record
from pipeline.errors import Failure, PipelineError, Stage, UsageError
from pipeline.geometry import AspectRatioError
from pipeline.keys import cache_key, canonical_json
from pipeline.pages import Page, SourceFile, discover
from pipeline.pages.decoders import Decoders
from pipeline.pages.records import Refused
from pipeline.pages.requests import DecodeRequest
from pipeline.pages.sources import source_digest
from pipeline.run.images import OpenPages
from pipeline.run.survey import JobSource, survey_job
from pipeline.store import BadEntry, Manifest, PageRecord
from pipeline.store.check import read_entry
from pipeline.store.layout import VERSION, manifest_name
from pipeline.store.media import medium_of

_PAGED = re.compile(r"(.+)#page=([0-9]+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Needs:
    """What jobs need of the cache: keys of entries, and manifests by their path from `v1/`.

    `missing` are pages that the cache lacks, `failures` lines and pages that can't be answered.
    """

    keys: frozenset[str]
    manifests: tuple[str, ...]
    missing: tuple[str, ...]
    failures: tuple[Failure, ...]


def needs_of(
    jobs: Iterable[Path], pages: OpenPages, base: Path | None, roots: tuple[Path, ...]
) -> Needs:
    """The entries that the jobs' pages have for this model; nothing is encoded.

    Raises JobError for a job that can't be read, PipelineError if it has pages and the cache
    none of them: then the model or the pixel settings are others than those of the run.
    """
    keys: set[str] = set()
    manifests: dict[str, None] = {}
    missing: list[str] = []
    failures: list[Failure] = []
    for job in jobs:
        with tempfile.TemporaryDirectory() as attachments:
            survey = survey_job(JobSource.of(job, base, roots, Path(attachments)))
            failures += survey.failures
            places = {}
            for image in survey.images:
                found = pages.locator.locate(image.path, image.page)
                places[f"{image.path}#page={image.page}"] = found
                manifests |= dict.fromkeys(_manifest_of(image.path, pages.target))
        failures += [found for found in places.values() if isinstance(found, Failure)]
        missing += [name for name, found in places.items() if found is None]
        here = {found.footer.key for found in places.values() if isinstance(found, Located)}
        if places and not here:
            raise PipelineError(
                f"no page of the job `{job}` is in the cache for this model",
                "give `--model` and the pixel settings that the job is run with",
            )
        keys |= here
    return Needs(frozenset(keys), tuple(manifests), tuple(missing), tuple(failures))


def keys_to_keep(needs: Needs) -> frozenset[str]:
    """The keys, if nothing else can be needed; raises PipelineError if a page can't be read."""
    unread = [failure for failure in needs.failures if failure.stage is Stage.READ]
    if unread:
        first = unread[0]
        raise PipelineError(
            f"{len(unread)} of the pages to keep can't be read, so what they need is not known; "
            f"the first: `{first.file}`: {first.detail}",
            "bring the files back, name their directory with `--root DIR`, or drop that `--keep`",
        )
    return needs.keys


def _manifest_of(path: Path, target: Target) -> Iterable[str]:
    """The manifest of a file as a path from the version directory, if it is there."""
    try:
        digest, kind = source_digest(path)
    except (OSError, Refused):
        return
    name = manifest_name(digest, target.render.digest(kind))
    if medium_of(target.store.root).state(name) is not None:
        yield name.removeprefix(f"{VERSION}/")


# ---------------------------------------------------------------- one page


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a page's entry lies or would lie, and what that follows from.

    `state` is `cached`, `missing` or `bad`, then with `why`; `last_use_s` since the epoch.
    """

    file: str
    page: int
    file_digest: str
    manifest: str
    manifest_there: bool
    pixels: str
    width_px: int
    height_px: int
    spec: dict[str, Any]
    tower: str
    key: str
    path: str
    state: str
    why: str | None
    bytes: int | None
    last_use_s: float | None

    def as_record(self) -> dict[str, Any]:
        """As `path --json` prints it."""
        return asdict(self)


def page_of(text: str) -> tuple[Path, int]:
    """`docs/a.pdf#page=3` as file and page; without a page it is the first."""
    found = None if os.path.exists(text) else _PAGED.fullmatch(text)
    return (Path(found[1]), int(found[2])) if found else (Path(text), 1)


def whereabouts(path: Path, page: int, target: Target) -> Whereabouts | Failure:
    """Where the entry of page `page` of a file lies, or why the page can have none.

    The page is decoded only where no manifest knows it. Changes nothing.
    """
    found = discover([path])
    if found.failures:
        return found.failures[0]
    if len(found.files) != 1 or found.files[0].path != path:
        raise UsageError(f"`{path}` is no page file", "name one file, as `docs/a.pdf#page=3`")
    file, (digest, _) = found.files[0], source_digest(path)
    manifest_place = manifest_name(digest, target.render.digest(file.kind))
    manifest = target.store.manifest(digest, target.render.digest(file.kind))
    record = _record(manifest, file, page, target)
    if isinstance(record, Failure):
        return record
    try:
        target.spec.geometry.place(record.height_px, record.width_px)
    except AspectRatioError as error:
        raise UsageError(f"`{path}` page {page} can't be encoded: {error}") from error
    return _traced(path, digest, manifest_place, record, target)


def _record(
    manifest: Manifest | None, file: SourceFile, page: int, target: Target
) -> PageRecord | Failure:
    for known in manifest.pages if manifest is not None else ():
        if isinstance(known, PageRecord) and known.page == page:
            return known
    decode = target.decode
    asked = DecodeRequest(file, target.render, frozenset({page}), decode.passwords)
    with Decoders(1, decode.limits) as decoders:
        outcome = decoders.page(asked)
    if not isinstance(outcome, Page):
        return outcome
    return page_record(outcome)


def _traced(
    path: Path, digest: str, manifest: str, record: PageRecord, target: Target
) -> Whereabouts:
    store, medium = target.store, medium_of(target.store.root)
    key = cache_key(record.pixels, target.spec, store.tower_fingerprint)
    name = store.name(key)
    found = medium.state(name)
    read = read_entry(medium, name, key, store.tower_fingerprint) if found else None
    return Whereabouts(
        file=str(path),
        page=record.page,
        file_digest=digest,
        manifest=medium.address(manifest),
        manifest_there=medium.state(manifest) is not None,
        pixels=record.pixels,
        width_px=record.width_px,
        height_px=record.height_px,
        spec=json.loads(canonical_json(asdict(target.spec))),
        tower=store.tower_fingerprint,
        key=key,
        path=medium.address(name),
        state="bad" if isinstance(read, BadEntry) else "missing" if read is None else "cached",
        why=read.why if isinstance(read, BadEntry) else None,
        bytes=None if found is None else found.st_size,
        last_use_s=None if found is None else round(found.st_mtime, 3),
    )
