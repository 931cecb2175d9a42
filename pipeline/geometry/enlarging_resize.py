"""The rule of PaddleOCR-VL: a side shorter than one token is first enlarged to one."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.geometry.placement import Placement, check_page_size
from pipeline.geometry.smart_resize import PixelBudget, resized_size, tokens


@dataclass(frozen=True, slots=True)
class EnlargingBudget(PixelBudget):
    """`PixelBudget` for pages that may be thinner than one token."""

    kind: str = field(default="enlarging_resize", init=False)

    def place(self, height_px: int, width_px: int) -> Placement:
        """See `Geometry.place`; the grid counts patches, before they are merged.

        Source: `smart_resize` of transformers' PaddleOCR-VL image processor.
        """
        check_page_size(height_px, width_px)
        factor = self.factor
        if height_px < factor:
            height_px, width_px = factor, round((width_px * factor) / height_px)
        if width_px < factor:
            height_px, width_px = round((height_px * factor) / width_px), factor
        height, width = resized_size(height_px, width_px, self)
        grid = (1, height // self.patch_size, width // self.patch_size)
        return Placement(height, width, tokens(grid, self.merge_size), grid)
