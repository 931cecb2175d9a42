"""What would be encoded: every page with its sizes and tokens, or why not; no model is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import Failure, Reason
from pipeline.geometry import AspectRatioError, Geometry
from pipeline.pages import DEFAULT_DPI, Page, decode_pages, discover


@dataclass(frozen=True, slots=True)
class PageLine:
    """A page as decoded (px) and at the model (px, tokens); or the reason why it is refused."""

    file: str
    page: int | None
    width_px: int | None = None
    height_px: int | None = None
    model_width_px: int | None = None
    model_height_px: int | None = None
    tokens: int | None = None
    reason: str | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class PageList:
    """All pages in order; `skipped` counts the files without pages."""

    pages: tuple[PageLine, ...]
    skipped: int

    def as_record(self) -> dict[str, Any]:
        """The list as `pages --json` prints it."""
        return {"pages": [asdict(page) for page in self.pages], "skipped": self.skipped}


def list_pages(
    paths: Sequence[Path | str], geometry: Geometry, *, dpi: int = DEFAULT_DPI
) -> PageList:
    """Decode every page below `paths` and size it for a model with this geometry."""
    found = discover(paths)
    lines = [_refused(failure) for failure in found.failures]
    for file in found.files:
        lines += _lines(decode_pages(file, dpi=dpi), geometry)
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
    return PageLine(name, page.page, width_px, height_px, *size, placed.tokens)
