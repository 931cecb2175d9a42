"""Qwen2.5-VL: a ViT most of whose layers attend in windows (https://arxiv.org/abs/2502.13923).

Dimension key beside that of `qwen_vision`: D hidden_size · I intermediate_size. Windows reorder
the rows inside the tower; they leave it in the page's own order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.families.qwen_vision import QwenVision, linear, merged_width, patch_shape


@dataclass(frozen=True)
class Qwen2_5VL(QwenVision):
    """Embeddings (R, O)."""

    settings: ClassVar[Mapping[str, Any]] = {
        "depth": 32,
        "hidden_size": 3584,
        "hidden_act": "silu",
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }

    def expected_shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Every tensor of `Qwen2_5_VisionTransformerPretrainedModel` with its shape."""
        c = self.vision_config(config)
        wide, inner = c["hidden_size"], c["intermediate_size"]
        merged = merged_width(c, wide)
        shapes: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": (wide, *patch_shape(c))}
        for layer in range(c["depth"]):
            block = f"blocks.{layer}"
            shapes |= linear(f"{block}.attn.qkv", wide, 3 * wide)
            shapes |= linear(f"{block}.attn.proj", wide, wide)
            shapes |= linear(f"{block}.mlp.gate_proj", wide, inner)
            shapes |= linear(f"{block}.mlp.up_proj", wide, inner)
            shapes |= linear(f"{block}.mlp.down_proj", inner, wide)
            shapes |= {f"{block}.norm1.weight": (wide,), f"{block}.norm2.weight": (wide,)}
        shapes["merger.ln_q.weight"] = (wide,)
        shapes |= linear("merger.mlp.0", merged, merged)
        shapes |= linear("merger.mlp.2", merged, c["out_hidden_size"])
        return shapes


FAMILY = Qwen2_5VL(
    "qwen2_5_vl",
    "Qwen2_5_VisionTransformerPretrainedModel",
    text_default=8192,
    text_at_top=True,
)
