"""Is a language model a hybrid: attention beside layers that carry a state?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LAYER_TYPES = {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "short_conv"}
# settings that only such models have: GDN of Qwen3-Next and Qwen3.5, Mamba, Jamba, Nemotron-H
_SETTINGS = (
    "linear_num_value_heads",
    "full_attention_interval",
    "mamba_d_state",
    "ssm_state_size",
    "attn_layer_period",
    "hybrid_override_pattern",
)


def is_hybrid(config: Mapping[str, Any]) -> bool:
    """True if a model with this config.json keeps a state besides its KV cache."""
    text = config.get("text_config")
    for settings in (config, text if isinstance(text, Mapping) else {}):
        types = settings.get("layer_types")
        if isinstance(types, list) and _LAYER_TYPES & {str(name) for name in types}:
            return True
        if any(settings.get(name) is not None for name in _SETTINGS):
            return True
    return False
