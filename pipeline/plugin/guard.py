"""What vLLM does not check about embeddings of the Qwen-VL kind, and dies or lies of.

Its parser of them serves Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and, by our patches, GLM-4V,
GLM-OCR and PaddleOCR-VL. A bad one is refused there, in the front end, where it costs its own
request alone.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pipeline.plugin.replace import replace
from pipeline.plugin.sources import MODELS, changed

if TYPE_CHECKING:
    import torch

PARSER = f"{MODELS}.qwen2_vl"
MODULES = (PARSER,)
FIELDS = {"image_embeds", "image_grid_thw"}
MARKER = "bad_embedding:"  # starts every message, so that a driver can tell
ENV_WIDTH = "PIPELINE_CONNECTOR_WIDTH"  # values per row; our drivers set it for their engines

_EXPECTED = {
    "Qwen2VLMultiModalDataParser.__init__": """
self._spatial_merge_size = spatial_merge_size
super().__init__(*args, **kwargs)
""",
    "Qwen2VLMultiModalDataParser._parse_image_data": """
if isinstance(data, dict):
    required, optional = self.embedding_field_sets("image")
    return DictEmbeddingItems(
        data,
        modality="image",
        required_fields=required,
        optional_fields=optional,
        fields_factory=_create_qwen2vl_field_factory(self._spatial_merge_size),
    )
return super()._parse_image_data(data)
""",
}


def source_misfit(name: str, text: str) -> str:
    """Why the parser can't be guarded; empty where it can."""
    return changed(text, _EXPECTED)


def patch(module: Any) -> None:
    """Guard the parser of vLLM's qwen2_vl, from which the others are derived."""
    guard_parser(module.Qwen2VLMultiModalDataParser)


def guard_parser(parser_class: Any) -> None:
    """Check the images of each request before vLLM takes them; at most once per class."""

    def guarded(parse: Any) -> Any:
        def _parse_image_data(self: Any, data: Any) -> Any:
            width = _row_width(self)
            if width and isinstance(data, dict) and "image_embeds" in data:
                check_images(data, width=width, merge=self._spatial_merge_size)
            return parse(self, data)

        return _parse_image_data

    replace(parser_class, "_parse_image_data", guarded)


def _row_width(parser: Any) -> int:
    """Values per row that the model takes; 0 in engines that are none of our business."""
    width = getattr(parser, "pipeline_row_width", None) or os.environ.get(ENV_WIDTH) or 0
    return int(width)


def check_images(data: dict[str, Any], *, width: int, merge: int) -> None:
    """Raise vLLM's own validation error unless the images of one request fit the model.

    data: `image_embeds` (rows, width) floating and finite, `image_grid_thw` (images, 3) in
    patches; rows = Σ t·h·w / merge².
    """
    reason = misfit(data, width=width, merge=merge)
    if reason:
        from vllm.exceptions import VLLMValidationError

        raise VLLMValidationError(f"{MARKER} {reason}")


def misfit(data: dict[str, Any], *, width: int, merge: int) -> str:
    """Why the images don't fit, in words; empty where they do."""
    if set(data) != FIELDS:
        return f"fields {sorted(data)} instead of {sorted(FIELDS)}"
    rows, grid = data["image_embeds"], data["image_grid_thw"]
    if not hasattr(rows, "is_floating_point") or not hasattr(grid, "is_floating_point"):
        return "image_embeds and image_grid_thw must be tensors"
    return _rows_misfit(rows, width) or _grid_misfit(grid, merge) or _sum_misfit(rows, grid, merge)


def _rows_misfit(rows: torch.Tensor, width: int) -> str:
    if rows.is_sparse or rows.ndim != 2:
        return f"image_embeds has shape {tuple(rows.shape)} instead of (rows, {width})"
    if not rows.is_floating_point():
        return f"image_embeds is {rows.dtype} instead of floating point"
    if rows.shape[1] != width:
        return f"image_embeds has {rows.shape[1]} columns instead of {width}"
    if not rows.isfinite().all():
        # One NaN also spoils the answers of the requests that come after it.
        return "image_embeds has values that are not finite"
    return ""


def _grid_misfit(grid: torch.Tensor, merge: int) -> str:
    if grid.ndim != 2 or grid.shape[1] != 3 or grid.is_floating_point():
        return f"image_grid_thw has shape {tuple(grid.shape)} instead of (images, 3)"
    if any(t != 1 or h < 1 or w < 1 or h % merge or w % merge for t, h, w in grid.tolist()):
        return f"image_grid_thw {grid.tolist()} is no grid of still images"
    return ""


def _sum_misfit(rows: torch.Tensor, grid: torch.Tensor, merge: int) -> str:
    expected = sum(h * w // merge**2 for _, h, w in grid.tolist())
    if rows.shape[0] != expected:
        return f"image_embeds has {rows.shape[0]} rows, image_grid_thw asks for {expected}"
    return ""
