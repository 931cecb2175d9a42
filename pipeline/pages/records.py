"""Records of finding and decoding, and the limits and rules that hold for every format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import Failure, Reason, Stage
from pipeline.keys import DecodeRules

Pixels = NDArray[np.uint8]

# Larger pages are refused from the header: 100 Mpx are 300 MB as RGB; A1 at 300 dpi has 70 Mpx.
MAX_PAGE_PIXELS = 100_000_000
# More directories in one TIFF are refused: finding a page takes time in their number.
MAX_TIFF_PAGES = 20_000
DEFAULT_DPI = 200

RULES = DecodeRules(
    orientation="exif or tiff tag, applied once",
    alpha="composited on white, transparent levels at their own depth",
    depth="16 bit v>>8, 12 bit v>>4, wider by the range of its values, white is zero turned over; "
    "cmyk by its icc profile",
    frames="tiff every frame, others the first",
    pdf="pdfium on white, forms and annotations drawn",
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that holds pages; `kind` is a key of `pipeline.pages.find.SIGNATURES`."""

    path: Path
    kind: str

    @property
    def paged(self) -> bool:
        """True if files of this kind can hold several pages."""
        return self.kind in ("tiff", "pdf")


@dataclass(frozen=True, slots=True)
class Discovery:
    """Files with pages in stable order; `skipped` counts files in directories that have none."""

    files: tuple[SourceFile, ...]
    skipped: int
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """A decoded page: its file, number from 1, and pixels, uint8 of shape (height, width, 3)."""

    file: SourceFile
    page: int
    rgb: Pixels


class Refused(Exception):
    """A page or file that can't be decoded; turned into a Failure before it leaves this package."""

    def __init__(self, reason: Reason, detail: str, stage: Stage = Stage.DECODE) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.stage = stage

    def as_failure(self, file: SourceFile, page: int | None) -> Failure:
        """The failure of `page` (None: of the whole file)."""
        retryable = self.stage is Stage.READ
        return Failure(
            str(file.path), page, self.stage, self.reason, self.detail, retryable=retryable
        )


# (number from 1, pixels or why not; None for a page that was not asked for)
Outcomes = Iterator[tuple[int, Pixels | Refused | None]]


def check_size(
    width_px: int, height_px: int, what: str = "", max_ratio: float | None = None
) -> None:
    """Refuse a page by its header: one too narrow for `max_ratio`, or with too many pixels."""
    if width_px < 1 or height_px < 1:
        raise Refused(Reason.CORRUPT, f"the page is {width_px} x {height_px} px{what}")
    ratio = max(width_px, height_px) / min(width_px, height_px)
    if max_ratio is not None and ratio > max_ratio:
        detail = f"aspect ratio {ratio:.1f} of {width_px} x {height_px} px is above {max_ratio}"
        raise Refused(Reason.ASPECT_RATIO, detail, Stage.RESIZE)
    if width_px * height_px > MAX_PAGE_PIXELS:
        raise Refused(
            Reason.TOO_LARGE,
            f"{width_px} x {height_px} px{what} is above {MAX_PAGE_PIXELS:,} pixels",
        )
