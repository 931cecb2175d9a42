"""Qwen3.5 and 3.6: Qwen3-VL's tower without DeepStack, under a text model of linear attention.

Dimension key beside that of `qwen_vision`: D hidden_size. Source: transformers' qwen3_5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.families.qwen3_vl import merger_shapes, vit_shapes
from pipeline.families.qwen_vision import QwenVision


@dataclass(frozen=True)
class Qwen3_5(QwenVision):
    """Embeddings (R, O); the mixture-of-experts family has the same tower."""

    cpu_dtype: str | None = "bfloat16"  # vLLM's gated delta rule for CPU takes no other
    settings: ClassVar[Mapping[str, Any]] = {
        "depth": 27,
        "hidden_size": 1152,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 4304,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
    }

    def expected_shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Every tensor of `Qwen3_5VisionModel` with its shape."""
        c = self.vision_config(config)
        return vit_shapes(c) | merger_shapes(c, "merger", c["hidden_size"])


FAMILY = Qwen3_5("qwen3_5", "Qwen3_5VisionModel")
