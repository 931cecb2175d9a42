"""Pixtral's rule: shrink a page to a longest edge, then round both sides up to whole tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pipeline.geometry.placement import AspectRatioError, Placement, check_page_size


@dataclass(frozen=True, slots=True)
class LongestEdge:
    """A page fits into `longest_edge_px` squared; `token_px` is the side of one token."""

    token_px: int
    longest_edge_px: int
    kind: str = field(default="longest_edge", init=False)

    def place(self, height_px: int, width_px: int) -> Placement:
        """Source: `get_resize_output_image_size` of transformers' Pixtral image processor.

        The same float operations in the same order. Raises AspectRatioError where the shorter
        side would vanish.
        """
        check_page_size(height_px, width_px)
        ratio = max(height_px / self.longest_edge_px, width_px / self.longest_edge_px)
        height, width = height_px, width_px
        if ratio > 1:
            height, width = math.floor(height_px / ratio), math.floor(width_px / ratio)
        if not height or not width:
            raise AspectRatioError(
                f"{width_px} x {height_px} px shrinks to {width} x {height} px to fit "
                f"{self.longest_edge_px} px"
            )
        rows, columns = ((side - 1) // self.token_px + 1 for side in (height, width))
        return Placement(rows * self.token_px, columns * self.token_px, rows * columns)
