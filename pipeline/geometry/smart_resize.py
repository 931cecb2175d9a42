"""The rule of the Qwen-VL kind: whole tokens of the page's own shape, within a pixel budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pipeline.errors import UsageError
from pipeline.geometry.placement import AspectRatioError, Grid, Placement, check_page_size

MAX_ASPECT_RATIO = 200
MAX_MIN_PIXELS = 100_000_000  # no page is enlarged beyond what may be decoded


@dataclass(frozen=True, slots=True)
class PixelBudget:
    """How large a page may be for the model: `min_pixels` to `max_pixels` in whole tokens.

    One token covers `factor` × `factor` px (a patch of `patch_size` px, merged `merge_size` times
    in each direction).
    """

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    kind: str = field(default="smart_resize", init=False)

    def __post_init__(self) -> None:
        for name in ("patch_size", "merge_size", "min_pixels", "max_pixels"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.min_pixels > self.max_pixels:
            raise UsageError(
                f"min_pixels {self.min_pixels} is above max_pixels {self.max_pixels}",
                "give both `--min-pixels` and `--max-pixels`, the smaller one first",
            )
        if self.min_pixels > MAX_MIN_PIXELS:
            raise UsageError(
                f"min_pixels {self.min_pixels} is above {MAX_MIN_PIXELS:,}", "lower `--min-pixels`"
            )
        if self.max_pixels < self.factor**2:
            raise UsageError(
                f"max_pixels {self.max_pixels} does not hold one token of "
                f"{self.factor} x {self.factor} px",
                f"raise `--max-pixels` to at least {self.factor**2}",
            )

    @property
    def factor(self) -> int:
        """Side of one token in px."""
        return self.patch_size * self.merge_size

    def place(self, height_px: int, width_px: int) -> Placement:
        """See `Geometry.place`; the grid counts patches, before they are merged."""
        height, width = resized_size(height_px, width_px, self)
        grid = (1, height // self.patch_size, width // self.patch_size)
        return Placement(height, width, tokens(grid, self.merge_size), grid)


def resized_size(height_px: int, width_px: int, budget: PixelBudget) -> tuple[int, int]:
    """(height, width) in px that the model's processor chooses for a page.

    Source: `smart_resize` of transformers' Qwen2-VL image processor. It works in floats, and
    where h·max/w is a perfect square their rounding decides; hence the same float operations in
    the same order here (IEEE arithmetic, equal on every machine).

    Raises AspectRatioError where one side is more than 200 times the other.
    """
    check_page_size(height_px, width_px)
    long_px, short_px = max(height_px, width_px), min(height_px, width_px)
    if long_px > MAX_ASPECT_RATIO * short_px:
        raise AspectRatioError(
            f"aspect ratio {long_px / short_px:.1f} of {width_px} x {height_px} px "
            f"is above {MAX_ASPECT_RATIO}"
        )
    factor = budget.factor
    height, width = (round(side / factor) * factor for side in (height_px, width_px))
    if height * width > budget.max_pixels:
        beta = math.sqrt((height_px * width_px) / budget.max_pixels)
        height = max(factor, math.floor(height_px / beta / factor) * factor)
        width = max(factor, math.floor(width_px / beta / factor) * factor)
    elif height * width < budget.min_pixels:
        beta = math.sqrt(budget.min_pixels / (height_px * width_px))
        height = math.ceil(height_px * beta / factor) * factor
        width = math.ceil(width_px * beta / factor) * factor
    return height, width


def tokens(grid: Grid, merge_size: int) -> int:
    """Tokens (rows of the embedding) of a grid of patches: t·h·w / merge_size²."""
    time, height, width = grid
    assert height % merge_size == 0 and width % merge_size == 0, (grid, merge_size)
    return time * (height // merge_size) * (width // merge_size)
