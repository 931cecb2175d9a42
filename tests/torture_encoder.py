"""Line 1 with nothing slow in it: a stand-in for the tower, and pages decoded in the process.

Made to be imported once and forked many times, see `test_check_torture.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import blake3  # noqa: F401 - this and others are for the processes that are forked
import numpy as np
import pyarrow.parquet  # noqa: F401
import torch
import torchvision.transforms.v2  # noqa: F401
from PIL import Image

from pipeline.checkpoint import resolve_model
from pipeline.encode import Outcome, encode_pages, reading, target_for
from pipeline.encode.records import Done
from pipeline.families import family_of
from pipeline.pages import Discovery, Page
from pipeline.store import Compression

WIDTH = 8192
MODEL = resolve_model(None)


class Noise:
    """A tower whose rows follow from the page."""

    def encode(self, pixels: np.ndarray) -> torch.Tensor:
        tokens = pixels.shape[0] * pixels.shape[1] // 32**2
        draw = np.random.default_rng(int(pixels.sum()))
        return torch.from_numpy(draw.normal(size=(tokens, WIDTH)))


class Here:
    """In the place of `Decoders`."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def ahead(self, items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Iterator[Page]]]:
        for item, request in items:
            yield item, iter(() if request is None else [self._page(request)])

    def _page(self, request: Any) -> Page:
        return Page(request.file, 1, np.asarray(Image.open(request.file.path)), False)


def encode(pages: list[Path], cache: Path, reports: Path, compression: Compression) -> None:
    """Encode pages, and append a page's key to `reports` once it is said to be done.

    In a process of its own: what it puts in place stays there.
    """
    type(family_of(MODEL)).load_tower = lambda *_: Noise()  # type: ignore[attr-defined]
    reading.Decoders = Here  # type: ignore[misc, assignment]
    descriptor = os.open(reports, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def watch(outcomes: Iterator[Outcome], found: Discovery) -> Iterator[Outcome]:
        for outcome in outcomes:
            assert isinstance(outcome, Done), outcome
            os.write(descriptor, f"{outcome.key}\n".encode())
            yield outcome

    target = target_for(MODEL, cache, compression=compression)
    encode_pages(pages, target, watch=watch, threads=1)
