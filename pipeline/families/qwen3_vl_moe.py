"""Qwen3-VL with mixture-of-experts text layers: the same tower under another model type."""

from __future__ import annotations

from pipeline.families.qwen3_vl import FAMILY as DENSE
from pipeline.families.qwen3_vl import Qwen3VL

FAMILY = Qwen3VL(
    "qwen3_vl_moe",
    "Qwen3VLMoeVisionModel",
    # the mixture's module holds a copy of the name that is patched, and the other's parser
    patches=(*DENSE.patches, "vllm.model_executor.models.qwen3_vl_moe"),
    text_default=2048,
)
