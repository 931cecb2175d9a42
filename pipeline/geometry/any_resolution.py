"""LLaVA-NeXT's rule: one of a few canvases of square tiles, its padding dropped from the rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pipeline.geometry.placement import Placement, check_page_size


@dataclass(frozen=True, slots=True)
class AnyResolution:
    """A page fitted into one of the `canvases` (height, width) of whole tiles of `tile_px` squared.

    A tile has `tile_side` rows in each direction. The rows: the whole page as one tile, then line
    by line the canvas without its padding, each line ended by one row more.
    """

    tile_px: int
    tile_side: int
    canvases: tuple[tuple[int, int], ...]
    kind: str = field(default="any_resolution", init=False)

    def place(self, height_px: int, width_px: int) -> Placement:
        """The canvas; `tiles` counts the whole page too.

        Source: `_get_unpadded_features` of transformers' processor and `unpad_image` of its
        model; the same float operations in the same order here.
        """
        check_page_size(height_px, width_px)
        canvas = self.canvas(height_px, width_px)
        down, across = canvas[0] // self.tile_px, canvas[1] // self.tile_px
        lines, columns = down * self.tile_side, across * self.tile_side
        if width_px / height_px > columns / lines:
            kept = int(round(height_px * (columns / width_px), 7))
            lines -= (lines - kept) // 2 * 2
        else:
            kept = int(round(width_px * (lines / height_px), 7))
            columns -= (columns - kept) // 2 * 2
        tokens = self.tile_side**2 + lines * (columns + 1)
        return Placement(*canvas, tokens, tiles=down * across + 1)

    def canvas(self, height_px: int, width_px: int) -> tuple[int, int]:
        """(height, width) in px: the most of the page's pixels, then the least padding.

        Source: `select_best_resolution` of transformers' image_processing_utils.
        """
        best, most, least = self.canvases[0], 0, math.inf
        for height, width in self.canvases:
            scale = min(width / width_px, height / height_px)
            shown = min(int(width_px * scale) * int(height_px * scale), width_px * height_px)
            wasted = height * width - shown
            if shown > most or (shown == most and wasted < least):
                best, most, least = (height, width), shown, wasted
        return best
