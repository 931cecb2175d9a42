"""Qwen3-VL with mixture-of-experts text layers: the same tower under another model type."""

from __future__ import annotations

from pipeline.families.qwen3_vl import Qwen3VL

FAMILY = Qwen3VL("qwen3_vl_moe", "Qwen3VLMoeVisionConfig", "Qwen3VLMoeVisionModel")
