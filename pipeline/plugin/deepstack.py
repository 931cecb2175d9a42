"""Qwen3-VL takes full-width embeddings with its tower absent.

A row of Qwen3-VL is hidden × (1 + levels) wide: the merged patch, then what DeepStack adds
to the first language layers. vLLM switches DeepStack off when the tower is not loaded, and
then loses those columns silently or dies of them. The language side needs nothing of the
tower, so we leave the switch on, for exactly these two models and only where the engine was
told to take embeddings.
"""

from __future__ import annotations

import ast
from typing import Any

from pipeline.plugin.guard import guard_parser
from pipeline.plugin.replace import replace
from pipeline.plugin.sources import MODELS, changed, parse

DENSE = f"{MODELS}.qwen3_vl"
MOE = f"{MODELS}.qwen3_vl_moe"  # imports its own copy of the name that we replace
MODULES = (DENSE, MOE)
ARCHITECTURES = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")
MODEL_TYPES = ("qwen3_vl", "qwen3_vl_moe")

# The only use of the name that we replace, as `ast.unparse` writes it.
_TOWER_TEST = (
    "self.use_deepstack = hasattr(config.vision_config, 'deepstack_visual_indexes') "
    "and (not isinstance(self.visual, StageMissingLayer))"
)
_EXPECTED = {
    "Qwen3VLProcessingInfo.get_data_parser": """
return Qwen3VLMultiModalDataParser(
    self.get_hf_config().vision_config.spatial_merge_size,
    video_needs_metadata=True,
    expected_hidden_size=self._get_expected_hidden_size(),
    allow_missing_mm_embeddings=self.allow_missing_mm_embeddings,
)
""",
    "Qwen3VLMultiModalDataParser._parse_image_data": "",
}


def source_misfit(name: str, text: str) -> str:
    """Why the switch can't be held; empty where it can."""
    if not _tests_tower_once(text):
        return "`StageMissingLayer` is not used as expected"
    return changed(text, _EXPECTED) if name == DENSE else ""


def _tests_tower_once(text: str) -> bool:
    nodes = list(ast.walk(parse(text)))
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == "StageMissingLayer"]
    statements = [node for node in nodes if isinstance(node, ast.Assign) and _targets_flag(node)]
    return len(uses) == 1 and [ast.unparse(node) for node in statements] == [_TOWER_TEST]


def _targets_flag(node: ast.Assign) -> bool:
    target = node.targets[0]
    return isinstance(target, ast.Attribute) and target.attr == "use_deepstack"


def patch(module: Any) -> None:
    """Patch vLLM's qwen3_vl or qwen3_vl_moe, whose source was accepted."""
    if not isinstance(module.StageMissingLayer, _AbsentTower):
        module.StageMissingLayer = _AbsentTower(
            "StageMissingLayer", (), {"original": module.StageMissingLayer}
        )
    if module.__name__ == DENSE:  # the MoE module imports its parser from there
        replace(module.Qwen3VLProcessingInfo, "get_data_parser", _with_row_width)
        guard_parser(module.Qwen3VLMultiModalDataParser)


class _AbsentTower(type):
    """Stands in for `StageMissingLayer` in the test that switches DeepStack off."""

    original: type

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.original) and not _takes_embeddings()


def _takes_embeddings() -> bool:
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    model = config.model_config if config is not None else None
    if model is None or model.architecture not in ARCHITECTURES:
        return False
    return bool(model.multimodal_config and model.multimodal_config.enable_mm_embeds)


def _with_row_width(make_parser: Any) -> Any:
    """Guarded in every engine: our patch makes rows of another width deadly."""

    def get_data_parser(self: Any) -> Any:
        parser = make_parser(self)
        config = self.get_hf_config()
        if config.model_type in MODEL_TYPES:
            parser.pipeline_row_width = row_width(config.vision_config)
        return parser

    return get_data_parser


def row_width(vision_config: Any) -> int:
    """Columns of one embedding row, DeepStack levels included."""
    levels = len(getattr(vision_config, "deepstack_visual_indexes", None) or ())
    return int(vision_config.out_hidden_size) * (1 + levels)
