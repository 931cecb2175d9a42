"""The rule of the GLM-V kind: a page counts as the frames that it is repeated to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pipeline.errors import UsageError
from pipeline.geometry.placement import AspectRatioError, Placement, check_page_size
from pipeline.geometry.smart_resize import MAX_ASPECT_RATIO, PixelBudget, tokens


@dataclass(frozen=True, slots=True)
class FrameBudget(PixelBudget):
    """`min_pixels` to `max_pixels` over all `frames` of a page, in whole tokens.

    The processor repeats a page to `frames` (temporal_patch_size) frames and counts them all: a
    page of 1,000 x 1,000 px has 2,000,000 px where there are two.
    """

    frames: int
    kind: str = field(default="frame_resize", init=False)

    def __post_init__(self) -> None:
        PixelBudget.__post_init__(self)
        if self.frames < 1:
            raise UsageError(f"frames must be at least 1, got {self.frames}")
        if self.max_pixels < self.frames * self.factor**2:
            raise UsageError(
                f"max_pixels {self.max_pixels} does not hold {self.frames} frames of one token of "
                f"{self.factor} x {self.factor} px",
                f"raise `--max-pixels` to at least {self.frames * self.factor**2}",
            )

    def place(self, height_px: int, width_px: int) -> Placement:
        """See `Geometry.place`; the grid counts patches, before they are merged."""
        height, width = _resized_size(height_px, width_px, self)
        grid = (1, height // self.patch_size, width // self.patch_size)
        return Placement(height, width, tokens(grid, self.merge_size), grid)


def _resized_size(height_px: int, width_px: int, budget: FrameBudget) -> tuple[int, int]:
    """(height, width) in px that the model's processor chooses for a page.

    Source: `smart_resize` of transformers' GLM-4V image processor, in the same float operations:
    their rounding decides where a product is a perfect square.
    """
    check_page_size(height_px, width_px)
    factor, frames = budget.factor, budget.frames
    page_height, page_width = height_px, width_px
    if height_px < factor or width_px < factor:
        scale = max(factor / height_px, factor / width_px)
        height_px, width_px = int(height_px * scale), int(width_px * scale)
    long_px, short_px = max(height_px, width_px), min(height_px, width_px)
    if long_px > MAX_ASPECT_RATIO * short_px:
        raise AspectRatioError(
            f"aspect ratio {long_px / short_px:.1f} of {page_width} x {page_height} px "
            f"is above {MAX_ASPECT_RATIO}"
        )
    height, width = (round(side / factor) * factor for side in (height_px, width_px))
    if frames * height * width > budget.max_pixels:
        beta = math.sqrt((frames * height_px * width_px) / budget.max_pixels)
        height = max(factor, math.floor(height_px / beta / factor) * factor)
        width = max(factor, math.floor(width_px / beta / factor) * factor)
    elif frames * height * width < budget.min_pixels:
        beta = math.sqrt(budget.min_pixels / (frames * height_px * width_px))
        height = math.ceil(height_px * beta / factor) * factor
        width = math.ceil(width_px * beta / factor) * factor
    return height, width
