"""The vision tensors of a checkpoint, found through its index; nothing else is read.

Headers are parsed here, so that no torch is needed: a safetensors file is 8 bytes of length, a
JSON header and raw bytes (https://huggingface.co/docs/safetensors#format).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.checkpoint.model import Model, first_line, read_json, shard_path
from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOAT_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_QUANTISED = re.compile(r"\.(weight_scale|weight_scale_inv|scales|qweight|qzeros|input_scale)$")
_MAX_HEADER_BYTES = 100_000_000


class WeightLayout(Protocol):
    """What a family tells about the vision tensors of its checkpoints."""

    def weight_name(self, name: str) -> str | None:
        """The tower's name of a checkpoint tensor; None if it is no vision tensor."""

    def expected_shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Name (in the tower) and shape of every vision tensor."""

    def vision_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """All settings of the tower, defaults filled in."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor inside a shard: bytes `start` to `stop` of the file."""

    shard: str
    stored_name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def shard_names(model: Model) -> dict[str, str]:
    """Tensor name → shard, from the index; or all tensors of the single file."""
    if (model.path / _INDEX).is_file():
        shards = read_json(model.path / _INDEX).get("weight_map")
        if not isinstance(shards, dict):
            raise CheckpointError(f"`{model.path / _INDEX}` has no weight_map")
        return {str(name): str(shard) for name, shard in shards.items()}
    header, _ = read_header(shard_path(model, _SINGLE))
    return dict.fromkeys(header, _SINGLE)


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


def vision_places(model: Model, layout: WeightLayout) -> dict[str, TensorPlace]:
    """Tower name → place of every vision tensor, in name order.

    Raises CheckpointError naming tensors that are missing, left over, of another shape, cut off,
    or quantised.
    """
    wanted: dict[str, str] = {}
    for stored, shard in shard_names(model).items():
        if layout.weight_name(stored) is not None:
            wanted[stored] = shard
    headers = {
        shard: read_header(shard_path(model, shard)) for shard in sorted(set(wanted.values()))
    }
    places: dict[str, TensorPlace] = {}
    for stored, shard in sorted(wanted.items()):
        name = layout.weight_name(stored)
        header, start = headers[shard]
        if stored not in header:
            raise CheckpointError(f"{shard} has no tensor {stored}, though the index says so")
        if name in places:
            raise CheckpointError(
                f"two tensors for {name}: {places[name].stored_name} and {stored}"
            )
        places[str(name)] = _place(shard, stored, header[stored], start)
    _check_places(model, places, layout.expected_shapes(model.config))
    return dict(sorted(places.items()))


def _place(shard: str, stored: str, entry: Mapping[str, Any], start: int) -> TensorPlace:
    try:
        low, high = map(index, entry["data_offsets"])
        dtype, shape = str(entry["dtype"]), tuple(map(index, entry["shape"]))
        size = prod(shape) * _FLOAT_BYTES.get(dtype, 0)  # 0: a type that is refused later on
        if low < 0 or (size and high - low != size):
            raise ValueError(f"{high - low} bytes for {dtype} of shape {list(shape)}")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{shard}: the header is damaged at {stored}: {first_line(error)}", "fetch it again"
        ) from error
    return TensorPlace(shard, stored, dtype, shape, start + low, start + high)


def _check_places(
    model: Model, places: Mapping[str, TensorPlace], expected: Mapping[str, tuple[int, ...]]
) -> None:
    where = f"vision tower of `{model.name}`"
    quantised = [name for name in places if _QUANTISED.search(name)]
    quantised += [name for name, place in places.items() if place.dtype not in _FLOAT_BYTES]
    if quantised:
        raise CheckpointError(
            f"{where}: quantised vision weights: {_some(quantised)}",
            "use a checkpoint whose vision tower is kept in 16 or 32 bits",
        )
    problems = {
        "missing": sorted(expected.keys() - places.keys()),
        "left over": sorted(places.keys() - expected.keys()),
        "of another shape": [
            f"{name} {list(place.shape)} instead of {list(expected[name])}"
            for name, place in places.items()
            if name in expected and place.shape != expected[name]
        ],
    }
    found = [f"{what}: {_some(names)}" for what, names in problems.items() if names]
    if found:
        raise CheckpointError(
            f"{where}: tensors " + "; ".join(found),
            "weights and config.json do not belong together",
        )
    for place in places.values():
        path = shard_path(model, place.shard)
        if place.stop > path.stat().st_size:
            raise CheckpointError(f"`{path}` is cut off", "fetch it again")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def vision_tensors(model: Model, layout: WeightLayout) -> dict[str, torch.Tensor]:
    """The vision tensors by tower name, as stored; nothing else of the weights is read."""
    from safetensors import SafetensorError, safe_open

    places = vision_places(model, layout)
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted({place.shard for place in places.values()}):
        path = shard_path(model, shard)
        try:
            with safe_open(path, framework="pt") as file:
                for name, place in places.items():
                    if place.shard == shard:
                        tensors[name] = file.get_tensor(place.stored_name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"can't read `{path}`: {first_line(error)}", "fetch it again"
            ) from error
    return tensors
