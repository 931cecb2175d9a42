"""What goes into an engine and comes out of it, and what a job line names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORTED_URLS = ("/v1/chat/completions",)


@dataclass(frozen=True, slots=True)
class ImageReference:
    """One image part of a job line: page `page` (from 1) of the file at `path`.

    `data` holds the decoded bytes of a `data:` url; `path` is then where they will be kept.
    """

    path: Path
    page: int
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class JobLine:
    """One valid line of a job file."""

    line_number: int
    custom_id: str
    url: str
    body: dict[str, Any]
    images: tuple[ImageReference, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """What an engine gets: a body whose image parts are references into the cache.

    `partial` if a page in it is what is left of one that is cut off.
    """

    custom_id: str
    url: str
    body: dict[str, Any]
    identity: str
    keys: tuple[str, ...]
    pages: tuple[tuple[str, int], ...]
    embedding_bytes: int
    partial: bool = False

    def as_line(self) -> dict[str, Any]:
        """The request as a batch line, the form that both drivers hand on."""
        head = {"custom_id": self.custom_id, "method": "POST", "url": self.url}
        return head | {"body": self.body}


@dataclass(frozen=True, slots=True)
class Result:
    """What an engine gives back for one request: vLLM's own status and response body."""

    custom_id: str
    status_code: int
    request_id: str
    body: dict[str, Any] | None
    error: str | None


@dataclass(frozen=True, slots=True)
class JobImage:
    """A page on its way into a job file; `paged` says that the file can hold several."""

    path: Path
    page: int
    paged: bool
