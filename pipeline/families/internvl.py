"""InternVL 3 and 3.5 in transformers' format: InternViT over tiles, four patches to a row.

Dimension key: T tiles, of E px squared · P patch_size · r downsample_ratio ·
S = (E/P · r)² rows of a tile · R = T·S rows · O width of the language model's input.

https://arxiv.org/abs/2504.10479. The rows are those of the canvas, tile by tile, then those of
the page as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint import Model, checked_settings
from pipeline.errors import CheckpointError
from pipeline.families.delivery import Delivery
from pipeline.families.processors import RESAMPLES, processor_settings, refuse_pixel_budget
from pipeline.families.transformers_family import TransformersFamily
from pipeline.geometry import ShapedCanvas
from pipeline.keys import EncodeSpec
from pipeline.pages import RULES

if TYPE_CHECKING:
    import torch

# Raised when the processor makes other pixels of the same page.
CONTRACT = 1

# The class defaults of transformers, which a checkpoint may leave out.
_VISION_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "attention_bias": False,
    "use_qk_norm": False,
    "use_absolute_position_embeddings": True,
    "use_mean_pooling": True,
    "hidden_act": "gelu",
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-6,
}
_CONNECTOR_DEFAULTS: dict[str, Any] = {"downsample_ratio": 0.5, "projector_hidden_act": "gelu"}
_IMAGE_DEFAULTS: dict[str, Any] = {
    "size": {"height": 384, "width": 384},
    "min_patches": 1,
    "max_patches": 12,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
}


@dataclass(frozen=True)
class InternVL(TransformersFamily):
    """OpenGVLab's `…-hf` checkpoints; the others have model type internvl_chat."""

    # ---------------------------------------------------------------- weights

    def vision_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """All that tower and connector compute with, defaults filled in."""
        given: Any = config.get("vision_config")
        vision = checked_settings(given, _VISION_DEFAULTS, "vision_config")
        sides = {name: _pair(given, name, side) for name, side in _SIDES.items()}
        return vision | sides | checked_settings(config, _CONNECTOR_DEFAULTS, "config.json")

    # ---------------------------------------------------------------- sizes

    def encode_spec(
        self,
        model: Model,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        precision: str = "float32",
    ) -> EncodeSpec:
        """See `Family.encode_spec`."""
        refuse_pixel_budget(self.name, min_pixels, max_pixels)
        _refuse_other_layers(model)
        kinds = ("GotOcr2ImageProcessor", "GotOcr2ImageProcessorFast")
        p = processor_settings(model, _IMAGE_DEFAULTS, kinds)
        return EncodeSpec(
            family=self.name,
            processor="GotOcr2ImageProcessor/torchvision",
            contract=CONTRACT,
            geometry=self._geometry(model, p),
            resample=RESAMPLES[p["resample"]],
            rescale_factor=float(p["rescale_factor"]),
            image_mean=tuple(map(float, p["image_mean"])),
            image_std=tuple(map(float, p["image_std"])),
            precision=precision,
            dtype="bfloat16",
            rules=RULES,
        )

    def _geometry(self, model: Model, p: Mapping[str, Any]) -> ShapedCanvas:
        c = self.vision_config(model.config)
        tile, (height, width) = (
            [p["size"].get(side) for side in ("height", "width")],
            c["image_size"],
        )
        if tile != [height, width]:
            raise CheckpointError(
                f"`{model.name}`: the image processor cuts tiles of {tile[1]} x {tile[0]} px, "
                f"the tower takes {width} x {height} px",
                "preprocessor_config.json and config.json do not belong together",
            )
        side = height // c["patch_size"][0]
        shuffled = int(side * c["downsample_ratio"])
        if height != width or c["patch_size"][0] != c["patch_size"][1] or shuffled < 1:
            raise CheckpointError(
                f"`{model.name}`: tiles of {width} x {height} px, patches of "
                f"{c['patch_size'][1]} x {c['patch_size'][0]} px and downsample_ratio "
                f"{c['downsample_ratio']} give no square of rows"
            )
        return ShapedCanvas(height, width, shuffled**2, p["min_patches"], p["max_patches"])

    # ---------------------------------------------------------------- engine

    def native_settings(self, spec: EncodeSpec) -> dict[str, Any]:
        """vLLM sizes its encoder's budget by the JSON alone: by one tile, if that says so."""
        return {"crop_to_patches": True}

    # ---------------------------------------------------------------- tower

    def make_processor(self, model: Model) -> Any:
        """With `crop_to_patches` on, whatever its JSON says: InternVLProcessor switches it on."""
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(model.path, crop_to_patches=True)

    def features(self, shell: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """pixel_values (T, 3, E, E) → (T, S, O) → (R, O)."""
        found = shell.model.get_image_features(pixel_values=inputs["pixel_values"])
        rows: torch.Tensor = found.pooler_output.flatten(0, 1)
        return rows


_SIDES = {"image_size": 448, "patch_size": 14}


def _pair(given: Mapping[str, Any], name: str, default: int) -> list[int]:
    """[height, width]; one number stands for both."""
    value = given.get(name, default)
    both = list(value) if isinstance(value, list | tuple) else [value, value]
    if len(both) != 2 or not all(type(side) is int and side > 0 for side in both):
        raise CheckpointError(f"vision_config: {name} can't be {value!r:.100}")
    return both


def _refuse_other_layers(model: Model) -> None:
    """vLLM's tower gives the last layer's patches, whatever config.json says."""
    expected = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
    for name, value in expected.items():
        given = model.config.get(name, value)
        if given != value:
            raise CheckpointError(
                f"`{model.name}`: {name} is {given!r:.100}, which vLLM does not follow",
                f"supported is {value!r}",
            )


FAMILY = InternVL(
    name="internvl",
    shell="InternVLForConditionalGeneration",
    prefixes=(
        ("vision_tower.", "vision_tower."),
        ("multi_modal_projector.", "multi_modal_projector."),
        ("model.vision_tower.", "vision_tower."),  # since transformers 4.52
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ),
    parts=("vision_tower.", "multi_modal_projector."),
    delivery=Delivery.ROWS,
    modalities=("image", "video"),
    patches=("vllm.model_executor.models.interns1",),
)
