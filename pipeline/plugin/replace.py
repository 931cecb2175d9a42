"""Replace a method of vLLM once, and act only in engines that take this model's embeddings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "pipeline_replaces"


def replace(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Make `owner.name` what `make(the original)` returns; a second call changes nothing.

    A method that a base class has is replaced in `owner` alone, unless it was replaced there.
    """
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return
    replacement = functools.wraps(original)(make(original))
    setattr(replacement, _MARK, original)
    setattr(owner, name, replacement)


def takes_embeddings(info: Any, model_types: tuple[str, ...]) -> bool:
    """Whether vLLM's processing info serves one of the models, in an engine for embeddings."""
    multimodal = info.ctx.model_config.multimodal_config
    if multimodal is None or not multimodal.enable_mm_embeds:
        return False
    return info.get_hf_config().model_type in model_types
