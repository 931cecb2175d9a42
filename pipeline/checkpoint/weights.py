"""The vision tensors of a checkpoint: all of them, each once, of the shape that the tower takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.checkpoint.files import Found, find_tensors
from pipeline.checkpoint.headers import TensorPlace
from pipeline.checkpoint.model import Model, first_names
from pipeline.checkpoint.quantised import join_scales
from pipeline.checkpoint.read import read_tensors, same_bytes
from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    import torch


class WeightLayout(Protocol):
    """What a family tells about the vision tensors of its checkpoints."""

    def weight_name(self, name: str) -> str | None:
        """The tower's name of a checkpoint tensor; None if it is no vision tensor."""

    def expected_shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
        """Name (in the tower) and shape of every vision tensor.

        None where only the module itself can tell: whoever loads it compares them then.
        """

    def vision_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """All settings of the tower, defaults filled in."""


def vision_places(model: Model, layout: WeightLayout) -> dict[str, TensorPlace]:
    """Tower name → place of every vision tensor, in name order; an FP8 one with its scale.

    Raises CheckpointError naming tensors that are missing, left over, of another shape, cut off,
    there twice with different values, or quantised in a format that can't be undone.
    """
    expected = layout.expected_shapes(model.config)
    found = find_tensors(model, layout.weight_name, expected or ())
    once = {name: _only(model, name, places, found) for name, places in found.places.items()}
    if not once:
        raise CheckpointError(
            f"`{model.name}` has no vision tensors in its safetensors files",
            "is it a complete model directory, and of the type that config.json names?",
        )
    places = join_scales(model, once)
    if expected is not None:
        require_tensors(model, {name: place.shape for name, place in places.items()}, expected)
    return dict(sorted(places.items()))


def vision_tensors(
    model: Model, layout: WeightLayout, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """The vision tensors by tower name, as stored or in `dtype`; no other weight is read.

    An FP8 weight is its value times its scale, in float32 where no type is asked for. While they
    are read, memory holds the result and one piece of a file.
    """
    return read_tensors(model, vision_places(model, layout), dtype)


def require_tensors(
    model: Model, given: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]
) -> None:
    """Raise CheckpointError unless exactly the expected tensors are given; both name → shape."""
    problems = tensor_problems(given, expected)
    if problems:
        raise CheckpointError(
            f"vision tower of `{model.name}`: tensors {problems}",
            "weights and config.json do not belong together",
        )


def tensor_problems(
    given: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]
) -> str:
    """What is missing, left over or of another shape, by name; empty if nothing is."""
    problems = {
        "missing": sorted(expected.keys() - given.keys()),
        "left over": sorted(given.keys() - expected.keys()),
        "of another shape": [
            f"{name} {list(given[name])} instead of {list(expected[name])}"
            for name in sorted(given.keys() & expected.keys())
            if list(given[name]) != list(expected[name])
        ],
    }
    return "; ".join(f"{what}: {first_names(names)}" for what, names in problems.items() if names)


def _only(model: Model, name: str, places: list[TensorPlace], found: Found) -> TensorPlace:
    """The one tensor of this name: that of the index, or any where all hold the same bytes.

    Copies under two prefixes are left behind by converters, and either is right while they are
    equal; one that differs was changed afterwards, and nothing tells which is meant.
    """
    listed = [place for place in places if found.listed.get(place.stored_name) == place.shard]
    first, *others = listed or places
    for other in others:
        if not same_bytes(model, first, other):
            raise CheckpointError(
                f"two tensors for {name}: {first.stored_name} in {first.shard} and "
                f"{other.stored_name} in {other.shard}, which differ",
                "remove the one that does not belong to this model",
            )
    return first
