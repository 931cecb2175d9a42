"""Qwen2-VL: a ViT with 2-D rotary positions at the page's own shape (https://arxiv.org/abs/2409.12191).

Dimension key beside that of `qwen_vision`: D embed_dim. This family calls O, the merger's width,
hidden_size in its vision_config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.families.qwen_vision import QwenVision, linear, merged_width, norm, patch_shape


@dataclass(frozen=True)
class Qwen2VL(QwenVision):
    """Embeddings (R, O)."""

    settings: ClassVar[Mapping[str, Any]] = {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }

    def expected_shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Every tensor of `Qwen2VisionTransformerPretrainedModel` with its shape."""
        c = self.vision_config(config)
        wide, merged = c["embed_dim"], merged_width(c, c["embed_dim"])
        shapes: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": (wide, *patch_shape(c))}
        for layer in range(c["depth"]):
            block = f"blocks.{layer}"
            shapes |= linear(f"{block}.attn.qkv", wide, 3 * wide)
            shapes |= linear(f"{block}.attn.proj", wide, wide)
            shapes |= linear(f"{block}.mlp.fc1", wide, c["mlp_ratio"] * wide)
            shapes |= linear(f"{block}.mlp.fc2", c["mlp_ratio"] * wide, wide)
            shapes |= norm(f"{block}.norm1", wide) | norm(f"{block}.norm2", wide)
        shapes |= norm("merger.ln_q", wide)
        shapes |= linear("merger.mlp.0", merged, merged)
        shapes |= linear("merger.mlp.2", merged, c["hidden_size"])
        return shapes

    def merger_width(self, config: Mapping[str, Any]) -> int:
        """O."""
        return int(self.vision_config(config)["hidden_size"])


FAMILY = Qwen2VL(
    "qwen2_vl",
    "Qwen2VisionTransformerPretrainedModel",
    text_default=8192,
    text_at_top=True,
)
