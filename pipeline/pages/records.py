"""Records of finding and decoding, and the limits and rules that hold for every format."""

from __future__ import annotations

import os
import resource
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
# A page with one side more than this many times the other is refused from the header, too: no
# model reads one, and the processors of the Qwen kind have the same limit.
MAX_ASPECT_RATIO = 200
DEFAULT_DPI = 200

RULES = DecodeRules(
    orientation="exif or tiff tag, applied once",
    alpha="composited on white, transparent levels at their own depth",
    depth="16 bit v>>8, 12 bit v>>4, wider by the range of its values, white is zero turned over",
    colour="cmyk by its icc profile",
    frames="tiff every frame, others the first",
    pdf="pdfium on white, forms and annotations drawn, at the model's size or at a dpi",
    limits="above 100,000,000 px or a side 200 times the other refused",
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
    """Files with pages in stable order; `skipped` counts files in directories that have none.

    `pageless` are those of them that lie in no archive, with their state before they were read.
    """

    files: tuple[SourceFile, ...]
    skipped: int
    failures: tuple[Failure, ...]
    pageless: tuple[tuple[Path, os.stat_result], ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """A decoded page: its file, number from 1, and pixels, uint8 of shape (height, width, 3).

    `partial` if the file is cut off and this is what is left of the page.
    """

    file: SourceFile
    page: int
    rgb: Pixels
    partial: bool = False


@dataclass(frozen=True, slots=True)
class PageRanges:
    """Page numbers from 1 as `--pages` gives them; a range without an end has None."""

    ranges: tuple[tuple[int, int | None], ...]

    def __contains__(self, number: int) -> bool:
        return any(
            first <= number and (last is None or number <= last) for first, last in self.ranges
        )

    def behind(self, number: int) -> PageRanges:
        """Those above `number`."""
        return PageRanges(tuple((max(first, number + 1), last) for first, last in self.ranges))


Wanted = frozenset[int] | PageRanges


def behind(wanted: Wanted | None, number: int) -> Wanted:
    """Those of the wanted pages (None: of all) above `number`."""
    if isinstance(wanted, frozenset):
        return frozenset(each for each in wanted if each > number)
    return (wanted or PageRanges(((1, None),))).behind(number)


class Refused(Exception):
    """A page or file that can't be decoded; turned into a Failure before it leaves this package."""

    def __init__(self, reason: Reason, detail: str, stage: Stage = Stage.DECODE) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.stage = stage

    def as_failure(self, path: Path, page: int | None) -> Failure:
        """The failure of `page` (None: of the whole file)."""
        retryable = self.stage is Stage.READ
        return Failure(str(path), page, self.stage, self.reason, self.detail, retryable=retryable)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Pixels of a page; `partial` as in `Page`."""

    rgb: Pixels
    partial: bool = False


# (number from 1, pixels or why not; None for a page that was not asked for)
Outcomes = Iterator[tuple[int, Decoded | Refused | None]]


def check_size(width_px: int, height_px: int, what: str = "") -> None:
    """Refuse a page by its header: one too narrow, or with too many pixels."""
    if width_px < 1 or height_px < 1:
        raise Refused(Reason.CORRUPT, f"the page is {width_px} x {height_px} px{what}")
    ratio = max(width_px, height_px) / min(width_px, height_px)
    if ratio > MAX_ASPECT_RATIO:
        detail = f"aspect ratio {ratio:.1f} of {width_px} x {height_px} px is above "
        raise Refused(Reason.ASPECT_RATIO, f"{detail}{MAX_ASPECT_RATIO}", Stage.RESIZE)
    if width_px * height_px > MAX_PAGE_PIXELS:
        raise Refused(
            Reason.TOO_LARGE,
            f"{width_px} x {height_px} px{what} is above {MAX_PAGE_PIXELS:,} pixels",
        )


def lacks_memory() -> Refused:
    """The refusal of a page for which memory does not suffice.

    Under a limit of the process's own the page is too large; otherwise the machine is at fault.
    """
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit_bytes == resource.RLIM_INFINITY:
        return Refused(Reason.UNREADABLE, "not enough memory to decode it", Stage.READ)
    return Refused(Reason.TOO_LARGE, f"decoding it takes more than {limit_bytes >> 20:,} MiB")
