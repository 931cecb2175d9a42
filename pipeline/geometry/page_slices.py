"""MiniCPM-V's rule: a small picture of the whole page, and a grid of slices of a large one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pipeline.geometry.placement import Placement, check_page_size


@dataclass(frozen=True, slots=True)
class PageSlices:
    """The page at about `scale_px` squared, and up to `max_slices` slices as large.

    Sides are whole multiples of four patches; `merge` patches make a row: 16, or 4 where the
    tower's first merging is left out.
    """

    patch_px: int
    scale_px: int
    max_slices: int
    merge: int
    kind: str = field(default="page_slices", init=False)

    def place(self, height_px: int, width_px: int) -> Placement:
        """The canvas that is cut, or the page where it is not; `tiles` counts the page too.

        Source: the image processor of transformers' MiniCPM-V 4.6; the same float operations in
        the same order here.
        """
        check_page_size(height_px, width_px)
        grid = self.grid(height_px, width_px)
        if grid is None:
            height, width = self._fitted(height_px, width_px, enlarge=True)
            return Placement(height, width, self._rows(height, width))
        rows, columns = grid
        whole = self._rows(*self._fitted(height_px, width_px, enlarge=False))
        height, width = self._fitted(
            _multiple(height_px, rows) / rows, _multiple(width_px, columns) / columns, enlarge=True
        )
        slices = rows * columns
        tokens = whole + slices * self._rows(height, width)
        return Placement(height * rows, width * columns, tokens, tiles=slices + 1)

    def grid(self, height_px: int, width_px: int) -> tuple[int, int] | None:
        """(rows, columns) of slices; None for a page that is small enough as it is."""
        wanted = min(math.ceil(width_px * height_px / self.scale_px**2), self.max_slices)
        if wanted <= 1:
            return None
        best, smallest = (1, 1), math.inf
        shape = math.log(width_px / height_px)
        for slices in (wanted - 1, wanted, wanted + 1):
            if slices == 1 or slices > self.max_slices:
                continue
            for rows in (n for n in range(1, slices + 1) if slices % n == 0):
                columns = slices // rows
                error = abs(shape - math.log(columns / rows))
                if error < smallest or (error == smallest and rows > best[0]):
                    best, smallest = (rows, columns), error
        return best

    def _fitted(self, height: float, width: float, *, enlarge: bool) -> tuple[int, int]:
        if enlarge or height * width > self.scale_px**2:
            ratio = width / height
            height = int(self.scale_px / math.sqrt(ratio))
            width = int(height * ratio)
        return _multiple(height, 4 * self.patch_px), _multiple(width, 4 * self.patch_px)

    def _rows(self, height: int, width: int) -> int:
        return height * width // (self.patch_px**2 * self.merge)


def _multiple(length: float, divisor: int) -> int:
    """The nearest multiple of `divisor`, at least one."""
    return max(round(length / divisor) * divisor, divisor)
