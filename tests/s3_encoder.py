"""Line 1 with a stand-in for the tower, to be imported once and forked: see `test_cache_s3.py`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import torch

from pipeline.checkpoint import resolve_model
from pipeline.encode import EncodeReport, encode_pages, target_for
from pipeline.families import family_of
from pipeline.store import Location

MODEL = resolve_model(None)
FAMILY = type(family_of(MODEL))
PAGE_S = 0.05

_SPEC = target_for(MODEL, Path("cache")).spec
family_of(MODEL).resize(  # imports what it needs, for all who are forked from here
    np.zeros((64, 96, 3), np.uint8), _SPEC.geometry.place(64, 96), _SPEC
)


class Noise:
    """A tower whose rows follow from the page."""

    def encode(self, pixels: np.ndarray) -> torch.Tensor:
        time.sleep(PAGE_S)
        tokens = pixels.shape[0] * pixels.shape[1] // 32**2
        draw = np.random.default_rng(int(pixels.sum()))
        return torch.from_numpy(draw.normal(size=(tokens, 64)))


def load_tower(*_: object) -> Noise:
    """In the place of the family's."""
    return Noise()


def encode(docs: Path, cache: Location) -> EncodeReport:
    """Encode the pages in `docs`."""
    return encode_pages([docs], target_for(MODEL, cache), threads=1)


def encode_alone(docs: Path, cache: Location, out: Path) -> None:
    """The same in a process that does nothing else; the report goes to `out`."""
    FAMILY.load_tower = load_tower  # type: ignore[attr-defined]
    out.write_text(json.dumps(encode(docs, cache).as_record()))
