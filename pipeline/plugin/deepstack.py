"""Qwen3-VL takes full-width embeddings with its tower absent.

A row of Qwen3-VL is hidden × (1 + levels) wide: the merged patch, then what DeepStack adds
to the first language layers. vLLM switches DeepStack off when the tower is not loaded, and
then loses those columns silently or dies of them. The language side needs nothing of the
tower, so we leave the switch on, for exactly these two models and only where the engine was
told to take embeddings.
"""

from __future__ import annotations

from typing import Any

from pipeline.plugin import sources
from pipeline.plugin.guard import check_images

ARCHITECTURES = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")
MODEL_TYPES = ("qwen3_vl", "qwen3_vl_moe")


def patch(module: Any) -> None:
    """Patch vLLM's qwen3_vl or qwen3_vl_moe, whose source `sources.misfit` has accepted."""
    if not isinstance(module.StageMissingLayer, _AbsentTower):
        module.StageMissingLayer = _AbsentTower(
            "StageMissingLayer", (), {"original": module.StageMissingLayer}
        )
    if module.__name__ == sources.DENSE:  # the MoE module imports its parser from there
        _guard_parser(module)


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


def _guard_parser(module: Any) -> None:
    """Refuse what would kill the engine, in the front end, where it costs one request."""
    info, parser_class = module.Qwen3VLProcessingInfo, module.Qwen3VLMultiModalDataParser
    make_parser, parse = info.get_data_parser, parser_class._parse_image_data

    def get_data_parser(self: Any) -> Any:
        parser = make_parser(self)
        config = self.get_hf_config()
        if config.model_type in MODEL_TYPES:
            parser.pipeline_row_width = row_width(config.vision_config)
        return parser

    def _parse_image_data(self: Any, data: Any) -> Any:
        width = getattr(self, "pipeline_row_width", None)
        if width is not None and isinstance(data, dict) and "image_embeds" in data:
            check_images(data, width=width, merge=self._spatial_merge_size)
        return parse(self, data)

    info.get_data_parser = get_data_parser
    parser_class._parse_image_data = _parse_image_data


def row_width(vision_config: Any) -> int:
    """Columns of one embedding row, DeepStack levels included."""
    levels = len(getattr(vision_config, "deepstack_visual_indexes", None) or ())
    return int(vision_config.out_hidden_size) * (1 + levels)
