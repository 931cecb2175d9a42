"""Records of line 1: a page is read, placed, resized, encoded, done; or it is a Failure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.checkpoint import Model, tower_fingerprint
from pipeline.encode.machine import choose_precision
from pipeline.errors import Failure, UsageError
from pipeline.families import PRECISIONS, Family, family_of
from pipeline.geometry import Geometry, Placement
from pipeline.keys import EncodeSpec, RenderSpec
from pipeline.memo import Memo, program_state
from pipeline.pages import DEFAULT_DPI, RULES, PageRanges, SourceFile, Wanted
from pipeline.pages.requests import DEFAULT_LIMITS, DecodeLimits
from pipeline.rerun import model_state
from pipeline.store import Compression, Entry, Location, Store

Pixels = NDArray[np.uint8]
Only = Mapping[Path, Wanted | None]  # file → its wanted pages, None for all


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """How files are decoded.

    `dpi` of PDF pages, None: at the model's size; `pages` of every document, None: all; `limits`
    hold for each of the decoding `processes`.
    """

    dpi: int | None = None
    pages: PageRanges | None = None
    passwords: tuple[str, ...] = ()
    allow_truncated: bool = False
    processes: int = 2
    limits: DecodeLimits = DEFAULT_LIMITS

    def __post_init__(self) -> None:
        if self.dpi is not None and self.dpi < 1:
            raise UsageError(f"dpi must be at least 1, got {self.dpi}")

    def render(self, geometry: Geometry) -> RenderSpec:
        """What pixels depend on, for a model with this geometry."""
        if self.dpi is None:
            return RenderSpec(RULES, DEFAULT_DPI, geometry, self.allow_truncated)
        return RenderSpec(RULES, self.dpi, None, self.allow_truncated)


DEFAULT_DECODE = DecodeOptions()


@dataclass(frozen=True, slots=True)
class Target:
    """What pages are encoded for: a model, the rules that decide bytes, and the cache."""

    model: Model
    family: Family
    spec: EncodeSpec
    store: Store
    decode: DecodeOptions = DEFAULT_DECODE

    @property
    def render(self) -> RenderSpec:
        """What a file's pixels depend on besides its bytes."""
        return self.decode.render(self.spec.geometry)


def target_for(
    model: Model,
    cache: Location,
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    decode: DecodeOptions = DEFAULT_DECODE,
    precision: str = "auto",
    compression: Compression = Compression.ZSTD,
    memo: Memo | None = None,
) -> Target:
    """The target of a model; raises CheckpointError or UsageError, imports no torch.

    With a `memo`, the tower's tensors are read only once, to fingerprint them, while the model's
    files are as they were.
    """
    precision = choose_precision(precision).value
    if precision not in PRECISIONS:
        raise UsageError(f"no precision {precision!r}", f"one of {', '.join(PRECISIONS)}")
    family = family_of(model)
    spec = family.encode_spec(
        model, min_pixels=min_pixels, max_pixels=max_pixels, precision=precision
    )
    store = Store(cache, _fingerprint(model, family, memo or Memo(None)), compression)
    return Target(model, family, spec, store, decode)


def _fingerprint(model: Model, family: Family, memo: Memo) -> str:
    subject, name = f"tower {program_state()}", os.path.abspath(model.path)
    state = model_state(model.path)
    known = None if state is None else memo.recall(subject, name, state)
    if isinstance(known, str):
        return known
    found = tower_fingerprint(model, family)
    if state is not None and model_state(model.path) == state:  # nothing was fetched meanwhile
        memo.note(subject, name, state, found)
    return found


@dataclass(frozen=True, slots=True)
class Document:
    """A page file with the digest of its bytes, and the state that it was in then."""

    file: SourceFile
    digest: str
    state: str


@dataclass(frozen=True, slots=True)
class PutOff:
    """A page that another encoder works on, by its cache key; or a whole document, page None."""

    file: SourceFile
    page: int | None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class PageRead:
    """A page with its decoded size; `rgb` is None where its embedding is already in the cache."""

    file: SourceFile
    page: int
    pixels: str
    height_px: int
    width_px: int
    rgb: Pixels | None


@dataclass(frozen=True, slots=True)
class Placed:
    """A page with its place at the model and in the cache (key)."""

    read: PageRead
    key: str
    placement: Placement


@dataclass(frozen=True, slots=True)
class Resized:
    """A page that must be encoded, its pixels (height, width, 3) as the tower takes them."""

    placed: Placed
    rgb: Pixels


@dataclass(frozen=True, slots=True)
class Encoded:
    """A page with its embedding."""

    placed: Placed
    entry: Entry


@dataclass(frozen=True, slots=True)
class Done:
    """A page whose embedding is in the cache; `stored_bytes` is None if it was there before."""

    file: SourceFile
    page: int
    key: str
    tokens: int
    pixels: int
    stored_bytes: int | None


Outcome = Done | Failure


@dataclass(frozen=True, slots=True)
class GoodPage:
    """A page that can stand in a job file; `paged` if its file can hold several."""

    path: Path
    page: int
    paged: bool
    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class EncodeReport:
    """What one call of `encode_pages` did; pages = encoded + cached + failed.

    `megapixels` (model size), `tokens` (rows) and `bytes` (stored) are of the encoded pages.
    """

    pages: int
    encoded: int
    cached: int
    failed: int
    skipped: int
    seconds: float
    megapixels: float
    tokens: int
    bytes: int
    failures: tuple[Failure, ...]
    good: tuple[GoodPage, ...]

    def as_record(self) -> dict[str, Any]:
        """The report as `encode --json` prints it."""
        counts = ("pages", "encoded", "cached", "failed", "skipped")
        return {
            **{name: getattr(self, name) for name in counts},
            "seconds": round(self.seconds, 3),
            "megapixels": round(self.megapixels, 6),
            "tokens": self.tokens,
            "bytes": self.bytes,
            "failures": [failure.as_record() for failure in self.failures],
        }
