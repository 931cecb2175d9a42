"""Idefics3's rule: a page of whole square tiles, and once more as a single tile."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pipeline.geometry.placement import Placement, check_page_size

_LARGEST_EDGE_PX = 4096  # MAX_IMAGE_SIZE of the image processor


@dataclass(frozen=True, slots=True)
class SquareTiles:
    """Tiles of `tile_px` squared, `tile_tokens` rows each, of a page scaled to a longest edge.

    Without `splitting` a page is one tile.
    """

    longest_edge_px: int
    tile_px: int
    tile_tokens: int
    splitting: bool = True
    kind: str = field(default="square_tiles", init=False)

    def place(self, height_px: int, width_px: int) -> Placement:
        """The canvas of tiles; `tiles` counts the page as a whole too, if it is cut."""
        check_page_size(height_px, width_px)
        height = width = self.tile_px
        if self.splitting:
            height, width = self._canvas(*self._scaled(height_px, width_px))
        cut = height * width // self.tile_px**2
        tiles = cut + 1 if cut > 1 else 1
        return Placement(height, width, tiles * self.tile_tokens, tiles=tiles)

    def _scaled(self, height: int, width: int) -> tuple[int, int]:
        """Source: `get_resize_output_image_size` of transformers' Idefics3 image processor."""
        ratio, edge = width / height, self.longest_edge_px
        if width >= height:
            width, height = edge, int(edge / ratio)
            height += height % 2
        else:
            width, height = int(edge * ratio), edge
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        ratio, edge = width / height, _LARGEST_EDGE_PX
        if width >= height and width > edge:
            width, height = edge, int(edge / ratio)
        elif height > width and height > edge:
            width, height = int(edge * ratio), edge
        return max(height, 1), max(width, 1)

    def _canvas(self, height: int, width: int) -> tuple[int, int]:
        """Source: `resize_for_vision_encoder` of the same processor."""
        ratio = width / height
        if width >= height:
            width = self._up(width)
            height = int(width / ratio)
        else:
            height = self._up(height)
            width = int(height * ratio)
        return self._up(height), self._up(width)

    def _up(self, side: int) -> int:
        return math.ceil(side / self.tile_px) * self.tile_px
