"""Qwen3-VL: a ViT with DeepStack (https://arxiv.org/abs/2511.21631).

Dimension key beside that of `qwen_vision`: D hidden_size · I intermediate_size · K number of
DeepStack layers.

The embedding of a page is (R, O·(1+K)): the merger's rows, then those of each DeepStack merger,
as vLLM splits them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.families.qwen_vision import QwenVision, linear, merged_width, norm, patch_shape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Qwen3VL(QwenVision):
    """The dense family; the mixture-of-experts one has the same tower under another type."""

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
        "deepstack_visual_indexes": [8, 16, 24],
    }

    def expected_shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Every tensor of `Qwen3VLVisionModel` with its shape."""
        c = self.vision_config(config)
        shapes = vit_shapes(c) | merger_shapes(c, "merger", c["hidden_size"])
        for number in range(len(c["deepstack_visual_indexes"])):  # normed after the merge
            name = f"deepstack_merger_list.{number}"
            shapes |= merger_shapes(c, name, merged_width(c, c["hidden_size"]))
        return shapes

    def row_width(self, config: Mapping[str, Any]) -> int:
        """O·(1+K)."""
        levels = len(self.vision_config(config)["deepstack_visual_indexes"])
        return self.merger_width(config) * (1 + levels)

    def features(self, shell: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """pixel_values (N, 3·T·P·P) and grid (1, 3) → (R, O·(1+K))."""
        import torch

        out = shell(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
        return torch.cat([out.pooler_output, *out.deepstack_features], dim=1)


def vit_shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors before the merger."""
    wide, inner = c["hidden_size"], c["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (wide, *patch_shape(c)),
        "patch_embed.proj.bias": (wide,),
        "pos_embed.weight": (c["num_position_embeddings"], wide),
    }
    for layer in range(c["depth"]):
        block = f"blocks.{layer}"
        shapes |= linear(f"{block}.attn.qkv", wide, 3 * wide)
        shapes |= linear(f"{block}.attn.proj", wide, wide)
        shapes |= linear(f"{block}.mlp.linear_fc1", wide, inner)
        shapes |= linear(f"{block}.mlp.linear_fc2", inner, wide)
        shapes |= norm(f"{block}.norm1", wide) | norm(f"{block}.norm2", wide)
    return shapes


def merger_shapes(c: Mapping[str, Any], name: str, norm_width: int) -> dict[str, tuple[int, ...]]:
    """Tensors of one merger, D·M² → O."""
    merged = merged_width(c, c["hidden_size"])
    return (
        norm(f"{name}.norm", norm_width)
        | linear(f"{name}.linear_fc1", merged, merged)
        | linear(f"{name}.linear_fc2", merged, c["out_hidden_size"])
    )


FAMILY = Qwen3VL("qwen3_vl", "Qwen3VLVisionModel", patches=("vllm.model_executor.models.qwen3_vl",))
