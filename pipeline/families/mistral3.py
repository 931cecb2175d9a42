"""Mistral Small 3.1 and 3.2: a Pixtral ViT (https://arxiv.org/abs/2410.07073) with merging.

Dimension key: H, W page in px · P patch_size · M spatial_merge_size · h, w = H/(P·M), W/(P·M) ·
R = h·w rows · O width of the language model's input.

In the prompt a page is h lines of w image tokens: a break token after each, an end token after
the last.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint import Model, checked_settings, read_json
from pipeline.errors import CheckpointError
from pipeline.families.delivery import Delivery
from pipeline.families.processors import RESAMPLES, processor_settings, refuse_pixel_budget
from pipeline.families.transformers_family import TransformersFamily
from pipeline.geometry import LongestEdge
from pipeline.keys import EncodeSpec
from pipeline.pages import RULES

if TYPE_CHECKING:
    import torch

# Raised when the processor makes other pixels of the same page.
CONTRACT = 1

# The class defaults of transformers, which a checkpoint may leave out.
VISION_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 1024,
    "patch_size": 16,
    "hidden_act": "gelu",
    "rope_theta": 10000.0,
}
CONNECTOR_DEFAULTS: dict[str, Any] = {
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": False,
    "spatial_merge_size": 2,
}
_IMAGE_DEFAULTS: dict[str, Any] = {
    "size": {"longest_edge": 1024},
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
}
_JOINT_DEFAULTS: dict[str, Any] = {
    "patch_size": 16,
    "spatial_merge_size": 1,
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}


@dataclass(frozen=True)
class Mistral3(TransformersFamily):
    """Also what LightOnOCR and Pixtral are made of."""

    # ---------------------------------------------------------------- weights

    def vision_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """All that tower and connector compute with, defaults filled in."""
        return pixtral_settings(config) | self.connector_settings(config)

    def connector_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The projector's own settings; its norm has the language model's epsilon."""
        given = config.get("text_config")
        text = checked_settings(given, {"rms_norm_eps": 1e-5}, "text_config")
        connector = checked_settings(config, CONNECTOR_DEFAULTS, "config.json")
        layer = config.get("vision_feature_layer", -1)
        return connector | {"vision_feature_layer": layer, "norm_eps": float(text["rms_norm_eps"])}

    # ---------------------------------------------------------------- sizes

    def merge_size(self, config: Mapping[str, Any]) -> int:
        """M."""
        return int(
            checked_settings(config, CONNECTOR_DEFAULTS, "config.json")["spatial_merge_size"]
        )

    def encode_spec(
        self,
        model: Model,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        precision: str = "float32",
    ) -> EncodeSpec:
        """See `Family.encode_spec`; the joint processor tells the image processor its P·M."""
        refuse_pixel_budget(self.name, min_pixels, max_pixels)
        kinds = ("PixtralImageProcessor", "PixtralImageProcessorFast")
        p = processor_settings(model, _IMAGE_DEFAULTS, kinds)
        edge = p["size"].get("longest_edge")
        if type(edge) is not int or edge < 1:
            raise CheckpointError(f"image processor of `{model.name}`: size has no longest_edge")
        return EncodeSpec(
            family=self.name,
            processor="PixtralImageProcessor/torchvision",
            contract=CONTRACT,
            geometry=LongestEdge(self._token_px(model), edge),
            resample=RESAMPLES[p["resample"]],
            rescale_factor=float(p["rescale_factor"]),
            image_mean=tuple(map(float, p["image_mean"])),
            image_std=tuple(map(float, p["image_std"])),
            precision=precision,
            dtype="bfloat16",
            rules=RULES,
        )

    def _token_px(self, model: Model) -> int:
        """P·M, on which processor and model must agree."""
        joint = joint_settings(model)
        cut = joint["patch_size"] * joint["spatial_merge_size"]
        taken = pixtral_settings(model.config)["patch_size"] * self.merge_size(model.config)
        if cut != taken or not cut:
            raise CheckpointError(
                f"`{model.name}`: the processor makes tokens of {cut} px, the tower of {taken} px",
                "processor_config.json and config.json do not belong together",
            )
        return int(cut)

    def placeholder(
        self, model: Model, spec: EncodeSpec, height_px: int, width_px: int
    ) -> tuple[str | int, ...]:
        """w rows and a break token, h times; the last break is an end token."""
        joint = joint_settings(model)
        lines, rows_per_line = self._lines(spec, height_px, width_px)
        pieces: list[str | int] = []
        for _ in range(lines):
            pieces += [rows_per_line, joint["image_break_token"]]
        return (*pieces[:-1], joint["image_end_token"])

    def _lines(self, spec: EncodeSpec, height_px: int, width_px: int) -> tuple[int, int]:
        """(h, w)."""
        assert isinstance(spec.geometry, LongestEdge)
        placed, side = spec.geometry.place(height_px, width_px), spec.geometry.token_px
        return placed.height_px // side, placed.width_px // side

    # ---------------------------------------------------------------- tower

    def make_processor(self, model: Model) -> Any:
        """The image processor as the joint processor calls it: its patch is a whole token."""
        processor = super().make_processor(model)
        side = self._token_px(model)
        processor.patch_size = {"height": side, "width": side}
        return processor

    def features(self, shell: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Pixels (1, 3, H, W) → (R, O)."""
        import torch

        pixels = torch.stack(list(inputs["pixel_values"]))
        out = shell.model.get_image_features(pixels, image_sizes=inputs["image_sizes"])
        rows: torch.Tensor = torch.cat(tuple(out.pooler_output))
        return rows


def pixtral_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The Pixtral ViT's settings; before transformers 5, rope_theta stood by itself."""
    given = config.get("vision_config")
    settings = checked_settings(given, VISION_DEFAULTS, "vision_config")
    rope = (given or {}).get("rope_parameters") or {}
    theta = {"rope_theta": settings["rope_theta"]}
    return settings | checked_settings(rope, theta, "rope_parameters")


def joint_settings(model: Model) -> dict[str, Any]:
    """What the joint processor adds to the image processor's settings."""
    path = model.path / "processor_config.json"
    given = read_json(path) if path.is_file() else {}
    return checked_settings(given, _JOINT_DEFAULTS, f"processor of `{model.name}`")


FAMILY = Mistral3(
    name="mistral3",
    shell="Mistral3ForConditionalGeneration",
    prefixes=(
        ("vision_tower.", "vision_tower."),
        ("multi_modal_projector.", "multi_modal_projector."),
        ("model.vision_tower.", "vision_tower."),  # since transformers 4.52
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ),
    parts=("vision_tower.", "multi_modal_projector."),
    delivery=Delivery.PROMPT,
)


def family_for(model: Model) -> TransformersFamily:
    """LightOnOCR comes under this model type too."""
    if "LightOnOCRForConditionalGeneration" in (model.config.get("architectures") or ()):
        family: TransformersFamily = importlib.import_module("pipeline.families.lightonocr").FAMILY
        return family
    return FAMILY
