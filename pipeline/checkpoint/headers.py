"""Headers of safetensors files: which tensor lies where. No weight is read.

Parsed here, so that no torch is needed: a file is 8 bytes of length, a JSON header and raw bytes
(https://huggingface.co/docs/safetensors#format).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from operator import index
from pathlib import Path
from typing import Any

from pipeline.checkpoint.model import first_line
from pipeline.errors import CheckpointError

# bytes per value of the types that are read; another type is refused where it is met
VALUE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Scale:
    """Factors of an FP8 tensor, taken as a matrix of (first dimension, all the others).

    `grid` is the factors' shape as a matrix; each factor is that of a block of values.
    """

    place: TensorPlace
    grid: tuple[int, int]
    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor inside a shard: bytes `start` to `stop` of the file; of an FP8 one, its scale."""

    shard: str
    stored_name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    scale: Scale | None = None

    @property
    def values(self) -> int:
        """How many it holds."""
        return prod(self.shape)

    @property
    def matrix(self) -> tuple[int, int]:
        """Its shape as (first dimension, all the others)."""
        return (self.shape or (1,))[0], prod(self.shape[1:])


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Tensors of a safetensors file (name → dtype, shape, data_offsets) and where data starts."""
    try:
        with open(path, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if not 2 <= size <= _MAX_HEADER_BYTES:
                raise ValueError(f"header of {size} bytes")
            header = json.loads(stream.read(size))
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        header.pop("__metadata__", None)
        return header, 8 + size
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"`{path}` is no safetensors file: {first_line(error)}") from error


def read_places(path: Path) -> dict[str, TensorPlace]:
    """Stored name → place of every tensor of a shard.

    Raises CheckpointError for a header that is damaged, and for a file that is longer or shorter
    than its header says: the format leaves no gaps, so every byte belongs to one tensor.
    """
    header, start = read_header(path)
    places = {name: _place(path.name, name, entry, start) for name, entry in header.items()}
    end = start
    for place in sorted(places.values(), key=lambda place: (place.start, place.stop)):
        if place.start != end:
            raise CheckpointError(
                f"{path.name}: the header is damaged at {place.stored_name}: "
                f"it starts at byte {place.start - start}, the one before ends at {end - start}",
                "fetch it again",
            )
        end = place.stop
    size = path.stat().st_size
    if size != end:
        what = "is cut off" if size < end else f"has {size - end} bytes too many"
        raise CheckpointError(f"`{path}` {what}", "fetch it again")
    return places


def _place(shard: str, stored: str, entry: Mapping[str, Any], start: int) -> TensorPlace:
    try:
        low, high = map(index, entry["data_offsets"])
        dtype, shape = str(entry["dtype"]), tuple(map(index, entry["shape"]))
        size = prod(shape) * VALUE_BYTES.get(dtype, 0)  # 0: a type that is not read
        if low < 0 or high < low or min(shape, default=0) < 0 or (size and high - low != size):
            raise ValueError(f"{high - low} bytes for {dtype} of shape {list(shape)}")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{shard}: the header is damaged at {stored}: {first_line(error)}", "fetch it again"
        ) from error
    return TensorPlace(shard, stored, dtype, shape, start + low, start + high)
