"""Where each page's embedding lies; what is missing is encoded by a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoint import Model, model_identity, resolve_model, tower_fingerprint
from pipeline.encode import EncodeOptions, EncodeReport, Locator, encode_pages
from pipeline.engines import guard
from pipeline.engines.arguments import ModelSource
from pipeline.errors import Failure, PipelineError, Reason, Stage
from pipeline.families import family_of
from pipeline.jobs import ImageReference
from pipeline.run.outcome import DamagedEntry
from pipeline.store import Footer, Store


@dataclass(frozen=True, slots=True)
class OpenPages:
    """A model and its part of the cache, without torch."""

    options: EncodeOptions
    model: Model
    store: Store
    locator: Locator
    model_identity: str
    deepstack: bool

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that a job may call the model by."""
        return tuple(dict.fromkeys((self.model.name, self.model.path.name)))

    def engine_source(self, served_names: tuple[str, ...], *, native: bool = False) -> ModelSource:
        """What an engine has to be told."""
        return ModelSource(
            path=self.model.path,
            served_names=served_names,
            cache=self.store.root,
            tower_fingerprint=self.store.tower_fingerprint,
            deepstack=self.deepstack,
            native=native,
        )

    def quarantine(self, damaged: Iterable[DamagedEntry]) -> None:
        """Move bad entries aside, so that their pages are missing again."""
        for entry in damaged:
            self.store.quarantine(entry.key, entry.why)


def open_pages(options: EncodeOptions) -> OpenPages:
    """Resolve the model and find its tower's part of the cache.

    Raises CheckpointError if the model can't be used.
    """
    model = resolve_model(options.model, options.revision)
    family = family_of(model)
    store = Store(options.cache, tower_fingerprint(model, family))
    spec = family.encode_spec(
        model,
        min_pixels=options.min_pixels,
        max_pixels=options.max_pixels,
        precision=options.precision,
    )
    return OpenPages(
        options=options,
        model=model,
        store=store,
        locator=Locator(store, spec, options.dpi),
        model_identity=model_identity(model),
        deepstack=family.row_width(model.config) > family.text_hidden_size(model.config),
    )


def locate_images(
    images: Iterable[ImageReference], pages: OpenPages, encode: bool, quiet: bool
) -> dict[tuple[Path, int], Footer | Failure]:
    """The cache entry of each page, or why it has none; encodes what is missing."""
    wanted = [(image.path, image.page) for image in images]
    found = {page: pages.locator.locate(*page) for page in wanted}
    missing = [page for page, place in found.items() if place is None]
    failures: dict[tuple[str | None, int | None], Failure] = {}
    if missing and encode:
        report = encode_apart(missing, pages.options, quiet)
        failures = {(failure.file, failure.page): failure for failure in report.failures}
        found |= {page: pages.locator.locate(*page) for page in missing}
    return {
        page: place if place is not None else _why_missing(page, failures, encode)
        for page, place in found.items()
    }


def encode_apart(
    missing: list[tuple[Path, int]], options: EncodeOptions, quiet: bool
) -> EncodeReport:
    """Encode pages in a process that ends afterwards, so that torch's memory goes with it."""
    only: dict[Path, set[int]] = {}
    for path, page in missing:
        only.setdefault(path, set()).add(page)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=guard.die_with_parent) as pool:
        try:
            return pool.submit(encode_pages, options, list(only), only=only, quiet=quiet).result()
        except BrokenProcessPool as error:
            raise PipelineError(
                "the encoding process died", "out of memory? finished pages are in the cache"
            ) from error


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
