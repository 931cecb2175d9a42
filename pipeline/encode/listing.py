"""What would be encoded: every page with its sizes and tokens, or why not; no model is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.encode.records import DEFAULT_DECODE, DecodeOptions
from pipeline.errors import Failure, Reason
from pipeline.geometry import AspectRatioError, Geometry
from pipeline.pages import Page, discover
from pipeline.pages.decoders import Decoders
from pipeline.pages.requests import DecodeRequest


@dataclass(frozen=True, slots=True)
class PageLine:
    """A page as decoded (px) and at the model (px, tokens); or the reason why it is refused.

    `partial` if the file is cut off and this is what is left of the page.
    """

    file: str
    page: int | None
    width_px: int | None = None
    height_px: int | None = None
    model_width_px: int | None = None
    model_height_px: int | None = None
    tokens: int | None = None
    reason: str | None = None
    detail: str | None = None
    partial: bool = False


@dataclass(frozen=True, slots=True)
class PageList:
    """All pages in order; `skipped` counts the files without pages."""

    pages: tuple[PageLine, ...]
    skipped: int

    def as_record(self) -> dict[str, Any]:
        """The list as `pages --json` prints it."""
        return {"pages": [_as_record(page) for page in self.pages], "skipped": self.skipped}


def _as_record(page: PageLine) -> dict[str, Any]:
    record = asdict(page)
    return record if page.partial else {k: v for k, v in record.items() if k != "partial"}


def list_pages(
    paths: Sequence[Path | str], geometry: Geometry, options: DecodeOptions = DEFAULT_DECODE
) -> PageList:
    """Decode every page below `paths` and size it for a model with this geometry."""
    found = discover(paths)
    lines = [_refused(failure) for failure in found.failures]
    render = options.render(geometry)
    asked = (
        (None, DecodeRequest(file, render, options.pages, options.passwords))
        for file in found.files
    )
    with Decoders(options.processes, options.limits) as decoders:
        for _, pages in decoders.ahead(asked):
            lines += _lines(pages, geometry)
    return PageList(tuple(lines), found.skipped)


def _lines(pages: Iterator[Page | Failure], geometry: Geometry) -> Iterator[PageLine]:
    for page in pages:
        yield _refused(page) if isinstance(page, Failure) else _sized(page, geometry)


def _refused(failure: Failure) -> PageLine:
    reason, detail = failure.reason.value, failure.detail
    return PageLine(str(failure.file), failure.page, reason=reason, detail=detail)


def _sized(page: Page, geometry: Geometry) -> PageLine:
    name = str(page.file.path)
    height_px, width_px, _ = page.rgb.shape
    try:
        placed = geometry.place(height_px, width_px)
    except AspectRatioError as error:
        reason, detail = Reason.ASPECT_RATIO.value, str(error)
        return PageLine(name, page.page, width_px, height_px, reason=reason, detail=detail)
    size = (placed.width_px, placed.height_px)
    return PageLine(
        name, page.page, width_px, height_px, *size, placed.tokens, partial=page.partial
    )
