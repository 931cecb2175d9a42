"""Where each page's embedding lies; what is missing is encoded by a process of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pipeline.checkpoint import fetch_weights, model_identity, resolve_model
from pipeline.encode import (
    DEFAULT_DECODE,
    DecodeOptions,
    EncodeReport,
    Located,
    Locator,
    Outcome,
    Target,
    encode_pages,
    target_for,
)
from pipeline.engines.arguments import ModelSource
from pipeline.errors import Failure, Reason, Stage
from pipeline.families import Delivery, reference_part
from pipeline.families.hybrid import is_hybrid
from pipeline.jobs import ImageReference
from pipeline.memo import Memo, memo_path
from pipeline.pages import Discovery
from pipeline.run.apart import call_apart
from pipeline.run.outcome import DamagedEntry
from pipeline.store import Footer, Location
from pipeline.store.history import note_look_ups


@dataclass(frozen=True, slots=True)
class PageOptions:
    """Which model's embeddings, made how, lying where."""

    cache: Location
    model: str | None = None
    revision: str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    decode: DecodeOptions = DEFAULT_DECODE
    precision: str = "auto"

    def target(self, memo: Memo | None = None) -> Target:
        """Resolve the model; raises CheckpointError or UsageError. Imports no torch."""
        return target_for(
            resolve_model(self.model, self.revision),
            self.cache,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
            decode=self.decode,
            precision=self.precision,
            memo=memo,
        )


@dataclass(frozen=True, slots=True)
class OpenPages:
    """A model and its part of the cache, without torch."""

    options: PageOptions
    target: Target
    locator: Locator
    model_identity: str

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that a job may call the model by."""
        model = self.target.model
        return tuple(dict.fromkeys((model.name, model.path.name)))

    def engine_source(self, served_names: tuple[str, ...], *, native: bool = False) -> ModelSource:
        """What an engine has to be told; a hub model is fetched whole, for it runs offline."""
        target = self.target
        fetch_weights(target.model)
        family, config = target.family, target.model.config
        return ModelSource(
            path=target.model.path,
            served_names=served_names,
            cache=target.store.root,
            tower_fingerprint=target.store.tower_fingerprint,
            modalities=family.modalities,
            row_width=family.row_width(config),
            deepstack=family.row_width(config) > family.text_hidden_size(config),
            prompt_embeds=family.delivery is Delivery.PROMPT,
            config_overrides=family.config_overrides(config),
            cpu_dtype=family.cpu_dtype,
            native=native,
            hybrid=is_hybrid(config),
        )

    def reference_part(self, footer: Footer) -> dict[str, Any]:
        """The content part by which an engine finds a page's embedding."""
        target = self.target
        return reference_part(footer, target.family, target.model, target.spec)

    def quarantine(self, damaged: Iterable[DamagedEntry]) -> None:
        """Move bad entries aside, so that their pages are missing again."""
        for entry in damaged:
            self.target.store.quarantine(entry.key, entry.why)


def open_pages(options: PageOptions) -> OpenPages:
    """Resolve the model and find its tower's part of the cache.

    Raises CheckpointError if the model can't be used.
    """
    memo = Memo(memo_path())
    target = options.target(memo)
    locator = Locator(target, memo)
    return OpenPages(options, target, locator, model_identity(target.model))


def locate_images(
    images: Iterable[ImageReference], pages: OpenPages, encode: bool, quiet: bool, command: str
) -> dict[tuple[Path, int], Located | Failure]:
    """The cache entry of each page, or why it has none; encodes what is missing.

    The cache remembers, under the name of the `command`, how many were there.
    """
    wanted = [(image.path, image.page) for image in images]
    found = {page: pages.locator.locate(*page) for page in wanted}
    pages.locator.remember()
    missing = [page for page, place in found.items() if place is None]
    failures: dict[tuple[str | None, int | None], Failure] = {}
    if missing and encode:
        report = encode_apart(missing, pages.options, quiet)
        failures = {(failure.file, failure.page): failure for failure in report.failures}
        found |= {page: pages.locator.locate(*page) for page in missing}
    lost = sum(place is None for place in found.values())
    note_look_ups(
        pages.target.store.root,
        command,
        pages=len(found),
        cached=len(found) - len(missing),
        encoded=len(missing) - lost,
        failed=lost,
    )
    return {
        page: place if place is not None else _why_missing(page, failures, encode)
        for page, place in found.items()
    }


def encode_apart(
    missing: list[tuple[Path, int]], options: PageOptions, quiet: bool
) -> EncodeReport:
    """Encode pages in a process that ends afterwards, so that torch's memory goes with it."""
    return call_apart(_encode, missing, options, quiet)


def _encode(missing: list[tuple[Path, int]], options: PageOptions, quiet: bool) -> EncodeReport:
    wanted: dict[Path, frozenset[int]] = {}
    for path, page in missing:
        wanted[path] = wanted.get(path, frozenset()) | {page}

    def watch(outcomes: Iterator[Outcome], found: Discovery) -> Iterable[Outcome]:
        off = quiet or None  # None: shown on a terminal only
        return tqdm(outcomes, "missing pages", len(missing), unit="page", disable=off)

    with Memo(memo_path()) as memo:
        target = options.target(memo)
        return encode_pages(list(wanted), target, only=wanted, watch=watch, memo=memo)


def _why_missing(
    page: tuple[Path, int],
    failures: dict[tuple[str | None, int | None], Failure],
    encoded: bool,
) -> Failure:
    path, number = page
    for key in ((str(path), number), (str(path), None)):
        if key in failures:
            return failures[key]
    hint = "encoding did not give it" if encoded else "run without --no-encode"
    return Failure(str(path), number, Stage.STORE, Reason.NOT_CACHED, f"not in the cache; {hint}")
