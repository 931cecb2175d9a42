"""What vLLM does not check about embeddings, and dies or lies of.

Of the faults measured on vLLM 0.32 only a few cost their own request alone: a wrong width, rank
or row count kills the engine, one value that is not finite spoils the answers of the requests
that come after it, and integers, surplus rows or a transposed grid give a wrong answer silently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

GRID_FIELDS = {"image_embeds", "image_grid_thw"}


def misfit(data: dict[str, Any], *, width: int, merge: int) -> str:
    """Why a request's images don't fit a model of the Qwen-VL kind; empty where they do.

    data: `image_embeds` (rows, width) floating and finite, `image_grid_thw` (images, 3) in
    patches; rows = Σ t·h·w / merge².
    """
    if set(data) != GRID_FIELDS:
        return f"fields {sorted(data)} instead of {sorted(GRID_FIELDS)}"
    rows, grid = data["image_embeds"], data["image_grid_thw"]
    if not hasattr(rows, "is_floating_point") or not hasattr(grid, "is_floating_point"):
        return "image_embeds and image_grid_thw must be tensors"
    return rows_misfit(rows, width) or _grid_misfit(grid, merge) or _sum_misfit(rows, grid, merge)


def rows_misfit(rows: torch.Tensor, width: int) -> str:
    """Why a tensor is no (rows, width) of finite floating-point values; empty where it is."""
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
