"""Model families: one file each, found by the `model_type` of config.json."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.checkpoint import Model, WeightLayout
from pipeline.errors import CheckpointError
from pipeline.keys import EncodeSpec

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

_MODULES = {
    "qwen3_vl": "pipeline.families.qwen3_vl",
    "qwen3_vl_moe": "pipeline.families.qwen3_vl_moe",
}
PRECISIONS = ("float32",)


class Tower(Protocol):
    """A vision tower ready to encode."""

    def encode(self, pixels: NDArray[np.uint8]) -> torch.Tensor:
        """Embedding, float of shape (rows, width), of one page at model size.

        `pixels` is uint8 of shape (height, width, 3). The page is attended alone.
        """

    def encode_original(self, rgb: NDArray[np.uint8], spec: EncodeSpec) -> torch.Tensor:
        """The same of a page that is not resized yet, resized by the checkpoint's processor.

        The reference of the parity check: no code of ours touches the pixels.
        """


class Family(WeightLayout, Protocol):
    """What the pipeline needs to know about a model family.

    Everything but `resize` and `load_tower` works without torch and transformers.
    """

    @property
    def name(self) -> str:
        """The `model_type` it serves."""

    def encode_spec(
        self,
        model: Model,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        precision: str = "float32",
    ) -> EncodeSpec:
        """What decides the embeddings' bytes; the pixel budget is the processor's, or overridden.

        Raises CheckpointError for a processor that is not this family's.
        """

    def row_width(self, config: Mapping[str, Any]) -> int:
        """Values per row of an embedding."""

    def text_hidden_size(self, config: Mapping[str, Any]) -> int:
        """Width of the language model's input."""

    def resize(
        self, rgb: NDArray[np.uint8], height_px: int, width_px: int, spec: EncodeSpec
    ) -> NDArray[np.uint8]:
        """The page (height, width, 3) at model size, equal to the processor's own resize."""

    def load_tower(self, model: Model, precision: str = "float32") -> Tower:
        """The tower with the checkpoint's vision weights, computing in `precision`."""


def family_of(model: Model) -> Family:
    """The family of a model; raises CheckpointError for one that is not known."""
    model_type = model.config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _MODULES:
        raise CheckpointError(
            f"`{model.name}` is of model type {model_type!r}, which is not supported",
            f"supported are {', '.join(sorted(_MODULES))}",
        )
    family: Family = importlib.import_module(_MODULES[model_type]).FAMILY
    return family
