"""LightOnOCR: Mistral 3's tower and connector under other names, its rows without breaks.

vLLM knows it as a `mistral3` with the architecture LightOnOCRForConditionalGeneration, as the
hub has it. Dimension key: see `mistral3`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.checkpoint import Model, checked_settings
from pipeline.families.delivery import Delivery
from pipeline.families.mistral3 import Mistral3, pixtral_settings
from pipeline.geometry import LongestEdge
from pipeline.keys import EncodeSpec


@dataclass(frozen=True)
class LightOnOCR(Mistral3):
    """vLLM sizes pages as Mistral 3's processor does, to whole tokens, and so do we.

    transformers' own LightOnOcrProcessor resizes to whole patches, and its connector drops what
    fills no token.
    """

    def connector_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Qwen3's epsilon, where the text config leaves it out."""
        given = config.get("text_config")
        text = checked_settings(given, {"rms_norm_eps": 1e-6}, "text_config")
        return super().connector_settings(config) | {"norm_eps": float(text["rms_norm_eps"])}

    def placeholder(
        self, model: Model, spec: EncodeSpec, height_px: int, width_px: int
    ) -> tuple[str | int, ...]:
        """R rows."""
        return (spec.geometry.place(height_px, width_px).tokens,)

    def warnings(self, model: Model) -> tuple[str, ...]:
        """vLLM's native path sizes its placeholder by another setting than its page."""
        return counted_by_image_size(self, model)


def counted_by_image_size(family: Mistral3, model: Model) -> tuple[str, ...]:
    """A sentence if the native path would count other tokens than its processor makes."""
    geometry = family.encode_spec(model).geometry
    assert isinstance(geometry, LongestEdge)
    counted = pixtral_settings(model.config)["image_size"]
    if counted == geometry.longest_edge_px:
        return ()
    return (
        f"the image processor sizes pages to {geometry.longest_edge_px} px, but "
        f"vision_config.image_size is {counted}: vLLM's native path counts tokens by the latter "
        "and fails",
    )


FAMILY = LightOnOCR(
    name="lightonocr",
    shell="Mistral3ForConditionalGeneration",
    prefixes=(
        ("model.vision_encoder.", "vision_tower."),
        ("model.vision_projection.", "multi_modal_projector."),
    ),
    parts=("vision_tower.", "multi_modal_projector."),
    delivery=Delivery.PROMPT,
)
