"""Pixtral 12B in transformers' format: a Llava whose vision config is a Pixtral ViT.

Dimension key: see `mistral3`, with M = 1: the connector is Llava's, a row per patch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.checkpoint import Model, checked_settings
from pipeline.families.delivery import Delivery
from pipeline.families.lightonocr import counted_by_image_size
from pipeline.families.mistral3 import Mistral3

_CONNECTOR_DEFAULTS: dict[str, Any] = {
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
    "vision_feature_select_strategy": "default",
}


@dataclass(frozen=True)
class PixtralHF(Mistral3):
    """Mistral 3's prompt and sizes, Llava's connector."""

    def connector_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Which layer is projected, and how."""
        layer = config.get("vision_feature_layer", -2)
        connector = checked_settings(config, _CONNECTOR_DEFAULTS, "config.json")
        return connector | {"vision_feature_layer": layer}

    def merge_size(self, config: Mapping[str, Any]) -> int:
        """1: each patch is a token."""
        return 1

    def warnings(self, model: Model) -> tuple[str, ...]:
        """As LightOnOCR's."""
        return counted_by_image_size(self, model)


FAMILY = PixtralHF(
    name="pixtral_hf",
    shell="LlavaForConditionalGeneration",
    prefixes=(
        ("vision_tower.", "vision_tower."),
        ("multi_modal_projector.", "multi_modal_projector."),
        ("model.vision_tower.", "vision_tower."),  # since transformers 4.52
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ),
    parts=("vision_tower.", "multi_modal_projector."),
    delivery=Delivery.PROMPT,
)
