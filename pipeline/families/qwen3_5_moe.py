"""Qwen3.5 and 3.6 with mixture-of-experts text layers: the same tower under another model type."""

from __future__ import annotations

from pipeline.families.qwen3_5 import Qwen3_5

FAMILY = Qwen3_5("qwen3_5_moe", "Qwen3_5MoeVisionModel", text_default=2048)
