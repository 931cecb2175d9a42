"""Same answers as the native path? The same pages and prompt, greedy, once with images and the
tower loaded, once with cached embeddings and the tower absent; compared token by token."""

from __future__ import annotations

import base64
import io
import json
import math
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image
from tqdm import tqdm

from pipeline.config import EngineOptions
from pipeline.encode import EncodeReport, GoodPage, encode_pages
from pipeline.engines.llm import LlmEngine
from pipeline.engines.supervisor import SetAside, supervise
from pipeline.errors import Failure, PipelineError, StoreError
from pipeline.jobs import SUPPORTED_URLS, JobImage, Request, Result, image_url
from pipeline.pages import Page, decode_pages, discover
from pipeline.run.apart import call_apart
from pipeline.run.images import OpenPages, PageOptions, open_pages
from pipeline.store import Entry

if TYPE_CHECKING:
    import torch

_SERVED = "parity"


@dataclass(frozen=True, slots=True)
class ParityOptions:
    """What to compare."""

    paths: tuple[Path, ...]
    pages: PageOptions
    engine: EngineOptions
    prompt: str
    max_tokens: int
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which two answers part; margin = the top-2 log-probability gap there."""

    custom_id: str
    position: int
    native: str
    cached: str
    margin: float


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer: its token ids and at each the log-probabilities of the best two."""

    text: str
    token_ids: tuple[int, ...]
    top_two: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class ParityReport:
    """`pages` were answered both ways; cosine_min is over all rows of all pages."""

    pages: int
    identical: int
    different: tuple[Difference, ...]
    cosine_min: float | None
    answers: dict[str, str]
    failures: tuple[Failure, ...]

    def as_record(self) -> dict[str, Any]:
        """The `parity --json` record."""
        return {
            "pages": self.pages,
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
    """Encode what is missing, answer every page both ways, compare.

    Raises PipelineError if an engine rejects a page that it should take.
    """
    measured = call_apart(_measure, options)
    pages = open_pages(options.pages)
    good = measured.report.good
    if not good:
        raise PipelineError(
            "there is no page to compare", "`pipeline pages PATH` tells why a page is none"
        )
    with tempfile.TemporaryDirectory(prefix="parity-") as directory:
        both = _BothWays(options, pages, good, Path(directory))
        native = both.answers(native_requests(good, options), native=True)
        cached = both.answers(cached_requests(good, pages, options), native=False)
    differences = tuple(
        found
        for custom_id in native
        if (found := difference(custom_id, native[custom_id], cached[custom_id])) is not None
    )
    return ParityReport(
        pages=len(native),
        identical=len(native) - len(differences),
        different=differences,
        cosine_min=measured.cosine_min,
        answers={custom_id: answer.text for custom_id, answer in cached.items()},
        failures=measured.report.failures,
    )


def difference(custom_id: str, native: Answer, cached: Answer) -> Difference | None:
    """Where two answers part, or None if they are the same to the last token."""
    if native.token_ids == cached.token_ids:
        return None
    pairs = zip(native.token_ids, cached.token_ids, strict=False)
    shorter = min(len(native.token_ids), len(cached.token_ids))
    position = next((at for at, (a, b) in enumerate(pairs) if a != b), shorter)
    longer = native if position < len(native.top_two) else cached
    best = sorted(longer.top_two[position], reverse=True)
    margin = best[0] - best[1] if len(best) > 1 else math.inf
    return Difference(custom_id, position, native.text, cached.text, margin)


# -- embeddings against the reference tower ---------------------------------------------------


def _measure(options: ParityOptions) -> Measured:
    target = options.pages.target()
    report = encode_pages(options.paths, target)
    tower = target.family.load_tower(target.model, "float32")
    lowest: float | None = None
    for good in tqdm(report.good, desc="cosine", unit="page", disable=options.quiet or None):
        entry = target.store.get(good.key)
        if not isinstance(entry, Entry):
            raise StoreError(f"cache entry {good.key[:12]}… is bad: {entry.why}", "run again")
        reference = tower.encode_original(_page(good, options.pages).rgb, target.spec)
        cosine = torch_cosine(reference, entry.tensor())
        lowest = cosine if lowest is None else min(lowest, cosine)
    return Measured(report, lowest)


def torch_cosine(reference: torch.Tensor, stored: torch.Tensor) -> float:
    """Lowest cosine between rows of the same number; both of shape (rows, width)."""
    import torch

    rows = torch.nn.functional.cosine_similarity(reference.double(), stored.double(), dim=1)
    return float(rows.min())


# -- both ways ----------------------------------------------------------------------------------


def native_requests(good: Iterable[GoodPage], options: ParityOptions) -> Iterator[Request]:
    """Each page as a `data:` url of its decoded pixels, not resized: vLLM's processor does that."""
    for page in good:
        buffer = io.BytesIO()
        Image.fromarray(_page(page, options.pages).rgb).save(buffer, "PNG", compress_level=1)
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        part = {"type": "image_url", "image_url": {"url": url}}
        yield _request(page, part, len(buffer.getvalue()), options)


def cached_requests(
    good: Iterable[GoodPage], pages: OpenPages, options: ParityOptions
) -> Iterator[Request]:
    """Each page as a reference into the cache."""
    for page in good:
        footer = pages.target.store.footer(page.key)
        if footer is None:
            raise StoreError(f"cache entry {page.key[:12]}… can't be read", "run again")
        part = pages.reference_part(footer)
        yield _request(page, part, footer.embedding_bytes, options)


def _request(
    page: GoodPage, part: dict[str, Any], size_bytes: int, options: ParityOptions
) -> Request:
    content = [{"type": "text", "text": options.prompt}, part]
    body = {
        "model": _SERVED,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": options.max_tokens,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    name = image_url(JobImage(page.path, page.page, page.paged), Path.cwd())
    return Request(
        name, SUPPORTED_URLS[0], body, name, (page.key,), ((str(page.path), page.page),), size_bytes
    )


def _page(good: GoodPage, options: PageOptions) -> Page:
    """Decode one page again; it was decoded before, so anything else is a broken program."""
    (file,) = discover([good.path]).files
    for page in decode_pages(file, dpi=options.dpi, only=frozenset({good.page})):
        if isinstance(page, Page):
            return page
    raise PipelineError(f"`{good.path}` page {good.page} can't be decoded any more")


@dataclass(frozen=True, slots=True)
class _BothWays:
    """One engine after the other over the same pages; logs go to `work`."""

    options: ParityOptions
    pages: OpenPages
    good: tuple[GoodPage, ...]
    work: Path

    def _sized_alike(self) -> EngineOptions:
        """vLLM's processor must be told of sizes that are not the checkpoint's own."""
        target = self.pages.target
        settings, engine = target.family.native_settings(target.spec), self.options.engine
        words = ("--mm-processor-kwargs", json.dumps(settings)) if settings else ()
        return replace(engine, extra_arguments=(*engine.extra_arguments, *words))

    def answers(self, requests: Iterator[Request], *, native: bool) -> dict[str, Answer]:
        source = self.pages.engine_source((_SERVED,), native=native)
        settings = self._sized_alike() if native else self.options.engine
        engine = LlmEngine(source, settings, self.work, self.work / "engine.json")
        name = "native images, tower loaded" if native else "cached embeddings, tower absent"
        answers: dict[str, Answer] = {}
        with (
            tqdm(
                desc=name, unit="page", total=len(self.good), disable=self.options.quiet or None
            ) as bar,
            closing(supervise(engine, requests)) as events,
        ):
            for event in events:
                if isinstance(event, Result):
                    answers[event.custom_id] = answer_of(event)
                    bar.update()
                elif isinstance(event, SetAside):
                    raise PipelineError(f"{event.request.custom_id}: {event.cause}", name)
        return answers


def answer_of(result: Result) -> Answer:
    """The answer in a chat completion; raises PipelineError if there is none."""
    if result.status_code != 200 or result.body is None:
        raise PipelineError(f"{result.custom_id}: the engine said: {result.error}")
    (choice,) = result.body["choices"]
    tops = (
        tuple(top["logprob"] for top in token["top_logprobs"])
        for token in choice["logprobs"]["content"]
    )
    return Answer(choice["message"]["content"], tuple(choice["token_ids"]), tuple(tops))
