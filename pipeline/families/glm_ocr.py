"""GLM-OCR: GLM-4V's tower with normed queries and keys, and no positions to interpolate.

Dimension key: that of `glm4v`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.checkpoint import Model, checked_settings
from pipeline.families.glm4v import FAMILY as GLM4V
from pipeline.families.glm4v import Glm4v, frame_shapes, gated, projection


@dataclass(frozen=True)
class GlmOcr(Glm4v):
    """Embeddings (R, O), the merger's rows."""

    settings: ClassVar[Mapping[str, Any]] = {
        **GLM4V.settings,
        "hidden_size": 1024,
        "attention_bias": True,
        "num_heads": 16,
        "out_hidden_size": 1536,
        "intermediate_size": 4096,
    }

    def expected_shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Every tensor of `GlmOcrVisionModel` with its shape."""
        c = self.vision_config(config)
        wide, bias = c["hidden_size"], c["attention_bias"]
        shapes = frame_shapes(c)
        for layer in range(c["depth"]):
            block = f"blocks.{layer}"
            shapes |= projection(f"{block}.attn.qkv", wide, 3 * wide, bias=bias)
            shapes |= projection(f"{block}.attn.proj", wide, wide, bias=bias)
            for name in ("q_norm", "k_norm"):
                shapes[f"{block}.attn.{name}.weight"] = (wide // max(c["num_heads"], 1),)
            shapes |= gated(f"{block}.mlp", wide, c["intermediate_size"], bias=bias)
        return shapes | gated("merger", c["out_hidden_size"], _merger_width(c), bias=False)

    def warnings(self, model: Model) -> tuple[str, ...]:
        """GLM-4V's, and a merger that vLLM would load cut off."""
        found = super().warnings(model)
        ours = _merger_width(self.vision_config(model.config))
        text = model.config.get("text_config") or {}
        theirs = checked_settings(text, {"intermediate_size": 4096}, "text_config")
        if theirs["intermediate_size"] == ours:
            return found
        return (
            *found,
            f"the merger is {ours} wide, vLLM's own takes text_config's intermediate_size "
            f"{theirs['intermediate_size']} for it: its native answers to images are wrong",
        )


def _merger_width(c: Mapping[str, Any]) -> int:
    """O·C, in transformers; vLLM takes the text's intermediate_size for the same number."""
    return int(c["out_hidden_size"] * c["in_channels"])


FAMILY = GlmOcr("glm_ocr", "GlmOcrVisionModel", patches=GLM4V.patches, text_default=1024)
