"""The comparison: pages into the cache, both paths asked, embeddings against the reference."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from pipeline.config import EngineOptions
from pipeline.encode import EncodeReport, encode_pages
from pipeline.errors import Failure, PipelineError, StoreError
from pipeline.parity.answers import Answer, Difference, ask, difference
from pipeline.parity.questions import (
    SERVED_NAME,
    Asking,
    Question,
    cached_requests,
    native_requests,
    page_again,
    questions,
)
from pipeline.run.apart import call_apart
from pipeline.run.images import OpenPages, PageOptions, open_pages
from pipeline.store import Entry
from pipeline.store.hold import hold_shared

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ParityOptions:
    """What to compare; `drivers` are the ways in which the cached side is asked."""

    paths: tuple[Path, ...]
    pages: PageOptions
    engine: EngineOptions
    prompt: str
    max_tokens: int
    pages_per_request: int = 1
    drivers: tuple[str, ...] = ("llm",)
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class ParityReport:
    """`requests` were answered both ways; cosine_min is over all rows of all pages.

    `answers` are those of the cached side, by the first driver.
    """

    pages: int
    requests: int
    different: tuple[Difference, ...]
    cosine_min: float | None
    answers: dict[str, Answer]
    failures: tuple[Failure, ...]

    @property
    def identical(self) -> int:
        """Requests whose answers were the same, by every driver."""
        return self.requests - len({each.custom_id for each in self.different})

    def as_record(self) -> dict[str, Any]:
        """The `parity --json` record."""
        return {
            "pages": self.pages,
            "requests": self.requests,
            "identical": self.identical,
            "different": [asdict(difference) for difference in self.different],
            "cosine_min": self.cosine_min,
        }


@dataclass(frozen=True, slots=True)
class Measured:
    """Pages in the cache, and the lowest cosine of any row against the reference tower."""

    report: EncodeReport
    cosine_min: float | None


def compare(options: ParityOptions) -> ParityReport:
    """Encode what is missing, answer every request both ways, compare.

    Raises PipelineError if an engine rejects a page that it should take.
    """
    measured = call_apart(measure, options.paths, options.pages, options.quiet)
    pages = open_pages(options.pages)
    good = measured.report.good
    if not good:
        raise PipelineError(
            "there is no page to compare", "`pipeline pages PATH` tells why a page is none"
        )
    asked = questions(good, options.pages_per_request)
    cache = hold_shared(options.pages.cache)  # no entry goes before it is answered
    with cache, tempfile.TemporaryDirectory(prefix="parity-") as directory:
        largest = max(page.tokens for page in good)
        sides = _Sides(options, pages, asked, largest, Path(directory))
        native = sides.native()
        cached = {driver: sides.cached(driver) for driver in options.drivers}
    differences = tuple(
        found
        for driver, answers in cached.items()
        for name in native
        if (found := difference(name, native[name], answers[name], driver)) is not None
    )
    first = next(iter(cached.values()))
    return ParityReport(
        pages=len(good),
        requests=len(native),
        different=differences,
        cosine_min=measured.cosine_min,
        answers=first,
        failures=measured.report.failures,
    )


def measure(paths: tuple[Path, ...], options: PageOptions, quiet: bool) -> Measured:
    """Encode what is missing, and compare every entry with the tower's output in float32."""
    target = options.target()
    report = encode_pages(paths, target)
    tower = target.family.load_tower(target.model, "float32")
    lowest: float | None = None
    for good in tqdm(report.good, desc="cosine", unit="page", disable=quiet or None):
        entry = target.store.get(good.key)
        if not isinstance(entry, Entry):
            raise StoreError(f"cache entry {good.key[:12]}… is bad: {entry.why}", "run again")
        reference = tower.encode_original(page_again(good, target).rgb, target.spec)
        cosine = lowest_cosine(reference, entry.tensor())
        lowest = cosine if lowest is None else min(lowest, cosine)
    return Measured(report, lowest)


def lowest_cosine(reference: torch.Tensor, stored: torch.Tensor) -> float:
    """Lowest cosine between rows of the same number; both of shape (rows, width)."""
    import torch

    rows = torch.nn.functional.cosine_similarity(reference.double(), stored.double(), dim=1)
    return float(rows.min())


@dataclass(frozen=True, slots=True)
class _Sides:
    """One engine after the other over the same questions."""

    options: ParityOptions
    pages: OpenPages
    asked: list[Question]
    largest_page_tokens: int
    work: Path

    def native(self) -> dict[str, Answer]:
        """From images, the tower loaded."""
        requests = native_requests(self.asked, self._asking(), self.pages.target)
        engine = replace(self._sized_alike(), driver="llm")
        source = self.pages.engine_source((SERVED_NAME,), native=True)
        return self._ask(source, engine, requests, "native images, tower loaded")

    def cached(self, driver: str) -> dict[str, Answer]:
        """From the cache, the tower absent."""
        requests = cached_requests(self.asked, self._asking(), self.pages)
        engine = replace(self.options.engine, driver=driver)
        source = self.pages.engine_source((SERVED_NAME,))
        source = replace(source, largest_page_tokens=self.largest_page_tokens)
        return self._ask(source, engine, requests, "cached embeddings, tower absent")

    def _asking(self) -> Asking:
        return Asking(self.options.prompt, self.options.max_tokens)

    def _ask(self, source: Any, engine: Any, requests: Any, name: str) -> dict[str, Answer]:
        return ask(
            source,
            engine,
            requests,
            self.work,
            name=name,
            total=len(self.asked),
            quiet=self.options.quiet,
        )

    def _sized_alike(self) -> EngineOptions:
        """vLLM's processor must be told of sizes that are not the checkpoint's own."""
        target = self.pages.target
        settings, engine = target.family.native_settings(target.spec), self.options.engine
        words = ("--mm-processor-kwargs", json.dumps(settings)) if settings else ()
        return replace(engine, extra_arguments=(*engine.extra_arguments, *words))
