"""Model families: one file each, found by the `model_type` of config.json."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.checkpoint import Model, WeightLayout
from pipeline.errors import CheckpointError
from pipeline.families.delivery import Delivery, reference_part
from pipeline.geometry import Placement
from pipeline.keys import EncodeSpec

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

__all__ = ["PRECISIONS", "Delivery", "Family", "Tower", "family_of", "reference_part"]

_MODULES = {
    "glm4v": "pipeline.families.glm4v",
    "glm_ocr": "pipeline.families.glm_ocr",
    "idefics3": "pipeline.families.idefics3",
    "internvl": "pipeline.families.internvl",
    "lfm2_vl": "pipeline.families.lfm2_vl",
    "llava": "pipeline.families.llava",
    "llava_next": "pipeline.families.llava_next",
    "minicpmv4_6": "pipeline.families.minicpmv4_6",
    "mistral3": "pipeline.families.mistral3",
    "paddleocr_vl": "pipeline.families.paddleocr_vl",
    "qwen2_5_vl": "pipeline.families.qwen2_5_vl",
    "qwen2_vl": "pipeline.families.qwen2_vl",
    "qwen3_5": "pipeline.families.qwen3_5",
    "qwen3_5_moe": "pipeline.families.qwen3_5_moe",
    "qwen3_vl": "pipeline.families.qwen3_vl",
    "qwen3_vl_moe": "pipeline.families.qwen3_vl_moe",
    "smolvlm": "pipeline.families.smolvlm",
}
# Known, and refused with the reason.
_REFUSED = {
    "deepseek_ocr": "vLLM reads only pixels, and transformers has no class for its tower",
    "deepseek_ocr2": "vLLM reads only pixels, and transformers has no class for its tower",
    "deepseek_vl_v2": "vLLM reads only pixels, and transformers has no class for its tower",
    "dots_ocr": "its tower is code of the checkpoint's own, which is not run",
    "gemma3": "its image tokens attend to each other both ways, which vLLM does only for pixels",
    "lighton_ocr": "vLLM starts it only as the hub has it: with model_type mistral3 and "
    "architectures LightOnOCRForConditionalGeneration in config.json",
}
PRECISIONS = ("float32",)


class Tower(Protocol):
    """A vision tower ready to encode."""

    def encode(self, pixels: NDArray[np.uint8]) -> torch.Tensor:
        """Embedding, float of shape (rows, width), of one page as `Family.resize` gives it.

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

    @property
    def delivery(self) -> Delivery:
        """How vLLM is handed its embeddings."""

    @property
    def modalities(self) -> tuple[str, ...]:
        """Modalities of vLLM's model class; each is limited to none to keep the tower off."""

    @property
    def patches(self) -> tuple[str, ...]:
        """Modules of vLLM that the plugin must patch for it."""

    @property
    def cpu_dtype(self) -> str | None:
        """The only dtype with which vLLM's CPU build runs it; None where any will do."""

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

    def placeholder(
        self, model: Model, spec: EncodeSpec, height_px: int, width_px: int
    ) -> tuple[str | int, ...]:
        """What stands for a page of this source size in the prompt: texts and runs of rows.

        Only of a family with Delivery.PROMPT.
        """

    def config_overrides(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What vLLM must be told over config.json (`--hf-overrides`) to start."""

    def native_settings(self, spec: EncodeSpec) -> dict[str, Any]:
        """Processor settings that make vLLM's native path size pages as `spec` does."""

    def warnings(self, model: Model) -> tuple[str, ...]:
        """What is odd about a checkpoint, one sentence each."""

    def resize(
        self, rgb: NDArray[np.uint8], placement: Placement, spec: EncodeSpec
    ) -> NDArray[np.uint8]:
        """The page (height, width, 3) as the tower takes it.

        At model size, equal to the processor's own resize; as it is, where the processor cuts
        tiles of it.
        """

    def load_tower(self, model: Model, precision: str = "float32") -> Tower:
        """The tower with the checkpoint's vision weights, computing in `precision`."""


def family_of(model: Model) -> Family:
    """The family of a model; raises CheckpointError for one that is not known."""
    model_type = model.config.get("model_type")
    if isinstance(model_type, str) and model_type in _REFUSED:
        raise CheckpointError(
            f"`{model.name}` is of model type {model_type}, which is not supported: "
            f"{_REFUSED[model_type]}",
            f"supported are {', '.join(sorted(_MODULES))}",
        )
    if not isinstance(model_type, str) or model_type not in _MODULES:
        raise CheckpointError(
            f"`{model.name}` is of model type {model_type!r}, which is not supported",
            f"supported are {', '.join(sorted(_MODULES))}",
        )
    module = importlib.import_module(_MODULES[model_type])
    family: Family = module.family_for(model) if hasattr(module, "family_for") else module.FAMILY
    return family
