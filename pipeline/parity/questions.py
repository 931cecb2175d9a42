"""What both paths are asked: the same pages and prompt, as images and as cached embeddings."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from pipeline.encode import GoodPage, Target
from pipeline.errors import PipelineError, StoreError
from pipeline.jobs import SUPPORTED_URLS, JobImage, Request, image_url
from pipeline.pages import Page, decode_pages, discover
from pipeline.run.images import OpenPages

SERVED_NAME = "parity"


@dataclass(frozen=True, slots=True)
class Question:
    """One request: a prompt, then its pages in order."""

    custom_id: str
    pages: tuple[GoodPage, ...]


@dataclass(frozen=True, slots=True)
class Asking:
    """How a question is put: greedily, with the log-probabilities of the best two tokens."""

    prompt: str
    max_tokens: int

    def body(self, parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """The chat body of one question."""
        content = [{"type": "text", "text": self.prompt}, *parts]
        return {
            "model": SERVED_NAME,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 2,
            "return_token_ids": True,
        }


def questions(
    good: Sequence[GoodPage], pages_per_request: int = 1, *, base: Path | None = None
) -> list[Question]:
    """Each page alone, and if more are wanted, each run of that many consecutive pages.

    They are named by the path below `base`, default the current directory.
    """
    names = [
        image_url(JobImage(page.path, page.page, page.paged), base or Path.cwd()) for page in good
    ]
    alone = [Question(name, (page,)) for name, page in zip(names, good, strict=True)]
    if pages_per_request < 2:
        return alone
    starts = range(0, len(good) - pages_per_request + 1, pages_per_request)
    return alone + [
        Question(
            " + ".join(names[start : start + pages_per_request]),
            tuple(good[start : start + pages_per_request]),
        )
        for start in starts
    ]


def native_requests(asked: Iterable[Question], asking: Asking, target: Target) -> Iterator[Request]:
    """Each page as a `data:` url of its decoded pixels, not resized: vLLM's processor does that."""
    for question in asked:
        parts, size_bytes = [], 0
        for page in question.pages:
            buffer = io.BytesIO()
            Image.fromarray(page_again(page, target).rgb).save(buffer, "PNG", compress_level=1)
            size_bytes += len(buffer.getvalue())
            url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
            parts.append({"type": "image_url", "image_url": {"url": url}})
        yield _request(question, asking.body(parts), size_bytes)


def cached_requests(
    asked: Iterable[Question], asking: Asking, pages: OpenPages
) -> Iterator[Request]:
    """Each page as a reference into the cache."""
    for question in asked:
        parts, size_bytes = [], 0
        for page in question.pages:
            footer = pages.target.store.footer(page.key)
            if footer is None:
                raise StoreError(f"cache entry {page.key[:12]}… can't be read", "run again")
            size_bytes += footer.embedding_bytes
            parts.append(pages.reference_part(footer))
        yield _request(question, asking.body(parts), size_bytes)


def _request(question: Question, body: dict[str, Any], size_bytes: int) -> Request:
    name = question.custom_id
    keys = tuple(page.key for page in question.pages)
    places = tuple((str(page.path), page.page) for page in question.pages)
    return Request(name, SUPPORTED_URLS[0], body, name, keys, places, size_bytes)


def page_again(good: GoodPage, target: Target) -> Page:
    """Decode one page again; it was decoded before, so anything else is a broken program."""
    (file,) = discover([good.path]).files
    only, passwords = frozenset({good.page}), target.decode.passwords
    for page in decode_pages(file, target.render, only=only, passwords=passwords):
        if isinstance(page, Page):
            return page
    raise PipelineError(f"`{good.path}` page {good.page} can't be decoded any more")
