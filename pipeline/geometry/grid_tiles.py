"""LFM2-VL's rule: a small page is resized, a large one cut into the grid nearest its shape."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pipeline.geometry.placement import AspectRatioError, Placement, check_page_size


@dataclass(frozen=True, slots=True)
class GridTiles:
    """Pages of `min_tokens` to `max_tokens` tokens; those `tolerance` times larger are cut.

    A token covers `patch_px` · `downsample` px in each direction. The grid has `min_tiles` to
    `max_tiles` tiles of `tile_px` squared, and the page resized as `thumbnail` after them.
    """

    patch_px: int
    downsample: int
    min_tokens: int
    max_tokens: int
    tile_px: int
    min_tiles: int
    max_tiles: int
    tolerance: float
    thumbnail: bool
    kind: str = field(default="grid_tiles", init=False)

    @property
    def token_px(self) -> int:
        """Side of one token in px."""
        return self.patch_px * self.downsample

    @property
    def tile_tokens(self) -> int:
        """Rows of one tile."""
        return math.ceil(self.tile_px // self.patch_px / self.downsample) ** 2

    def place(self, height_px: int, width_px: int) -> Placement:
        """The canvas of tiles, or the page resized; `tiles` counts the thumbnail too."""
        check_page_size(height_px, width_px)
        height, width = self.resized(height_px, width_px)
        rows, columns = self.layout(height_px, width_px)
        tiles = rows * columns
        whole = (height // self.token_px) * (width // self.token_px)
        if tiles == 1:
            return Placement(height, width, whole)
        return Placement(
            rows * self.tile_px,
            columns * self.tile_px,
            tiles * self.tile_tokens + whole * self.thumbnail,
            tiles=tiles + self.thumbnail,
        )

    def resized(self, height_px: int, width_px: int) -> tuple[int, int]:
        """(height, width) of the page as a whole.

        Source: `smart_resize` of transformers' LFM2-VL image processor. Raises AspectRatioError
        where a page so long would have more patches than it makes room for.
        """
        side = self.token_px
        low, high = self.min_tokens * side**2, self.max_tokens * side**2
        height, width = (max(side, round(px / side) * side) for px in (height_px, width_px))
        if height * width > high:
            beta = math.sqrt((height_px * width_px) / high)
            height = max(side, math.floor(height_px / beta / side) * side)
            width = max(side, math.floor(width_px / beta / side) * side)
        elif height * width < low:
            beta = math.sqrt(low / (height_px * width_px))
            height = math.ceil(height_px * beta / side) * side
            width = math.ceil(width_px * beta / side) * side
        room = max(self.max_tokens * self.downsample**2, (self.tile_px // self.patch_px) ** 2)
        if (height // self.patch_px) * (width // self.patch_px) > room:
            raise AspectRatioError(
                f"{width_px} x {height_px} px is too long: {width} x {height} px hold more "
                f"than {room} patches"
            )
        return height, width

    def layout(self, height_px: int, width_px: int) -> tuple[int, int]:
        """(rows, columns) of tiles; (1, 1) for a page that is not cut."""
        if self.min_tiles == self.max_tiles == 1 or not self._is_large(height_px, width_px):
            return 1, 1
        columns, rows = self._closest(width_px / height_px, height_px * width_px)
        return rows, columns

    def _is_large(self, height_px: int, width_px: int) -> bool:
        """Source: `_is_image_too_large` of the same processor."""
        side = self.token_px
        height, width = (
            max(self.patch_px, round(px / side) * side) for px in (height_px, width_px)
        )
        return height * width > self.max_tokens * side**2 * self.tolerance

    def _closest(self, shape: float, area: int) -> tuple[int, int]:
        """(columns, rows) nearest to width / height `shape`; of two, the larger if it is filled.

        Source: `find_closest_aspect_ratio` of the same processor, whose order within one number
        of tiles is that of a set: hence the same set here.
        """
        best, nearest = (1, 1), math.inf
        for columns, rows in sorted(set(self._grids()), key=lambda grid: grid[0] * grid[1]):
            distance = abs(shape - columns / rows)
            filled = area > 0.5 * (self.tile_px * self.tile_px * columns * rows)
            if distance < nearest or (distance == nearest and filled):
                best, nearest = (columns, rows), distance
        return best

    def _grids(self) -> list[tuple[int, int]]:
        return [
            (columns, rows)
            for tiles in range(self.min_tiles, self.max_tiles + 1)
            for columns in range(1, tiles + 1)
            for rows in range(1, tiles + 1)
            if self.min_tiles <= columns * rows <= self.max_tiles
        ]
