"""InternVL's rule: a canvas of tiles whose shape is nearest to the page's, and the whole page."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pipeline.geometry.placement import Placement, check_page_size


@dataclass(frozen=True, slots=True)
class ShapedCanvas:
    """A page is stretched to `min_tiles` to `max_tiles` tiles, each of `tile_tokens` rows.

    The whole page as one more tile follows wherever there is more than one.
    """

    tile_height_px: int
    tile_width_px: int
    tile_tokens: int
    min_tiles: int
    max_tiles: int
    kind: str = field(default="shaped_canvas", init=False)

    def place(self, height_px: int, width_px: int) -> Placement:
        """The canvas; `tiles` counts the whole page too, if it is cut."""
        check_page_size(height_px, width_px)
        rows, columns = self.layout(height_px, width_px)
        cut = rows * columns
        tiles = cut + 1 if cut > 1 else 1
        height, width = rows * self.tile_height_px, columns * self.tile_width_px
        return Placement(height, width, tiles * self.tile_tokens, tiles=tiles)

    def layout(self, height_px: int, width_px: int) -> tuple[int, int]:
        """(rows, columns) of tiles.

        Source: `get_optimal_tiled_canvas` of transformers' GOT-OCR2 image processor. Ties are
        decided by equality of floats; hence the same operations in the same order here.
        """
        best, smallest = (1, 1), math.inf
        for rows, columns in self._layouts():
            difference = abs(width_px / height_px - columns / rows)
            covered = self.tile_height_px * self.tile_width_px * columns * rows
            tie = difference == smallest and height_px * width_px > 0.5 * covered
            if difference < smallest or tie:
                best, smallest = (rows, columns), difference
        return best

    def _layouts(self) -> list[tuple[int, int]]:
        """(rows, columns) from few tiles to many, narrow ones first."""
        side = range(1, self.max_tiles + 1)
        found = [
            (rows, columns)
            for columns in side
            for rows in range(1, self.max_tiles // columns + 1)
            if rows * columns >= self.min_tiles
        ]
        return sorted(found, key=lambda layout: layout[0] * layout[1])
