"""The rule of CLIP and SigLIP: every page becomes the same square."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.geometry.placement import AspectRatioError, Placement, check_page_size

_MAX_SCALED_PX = 200_000_000


@dataclass(frozen=True, slots=True)
class FixedSize:
    """A page of `side_px` squared, `rows` rows.

    `fit` is what the processor does with another shape: "stretch" it, "crop" it in the middle
    once the shortest side is `scaled_px` long, or "pad" it to a square first.
    """

    side_px: int
    rows: int
    fit: str
    scaled_px: int
    kind: str = field(default="fixed_size", init=False)

    def place(self, height_px: int, width_px: int) -> Placement:
        """The square; raises AspectRatioError for a page that can't be held while it is fitted."""
        check_page_size(height_px, width_px)
        long_px, short_px = max(height_px, width_px), min(height_px, width_px)
        held = {
            "stretch": 0,
            "crop": self.scaled_px**2 * long_px // short_px,
            "pad": long_px**2,
        }[self.fit]
        if held > _MAX_SCALED_PX:
            raise AspectRatioError(
                f"{width_px} x {height_px} px would be {held:,} px before the "
                f"{'square' if self.fit == 'pad' else 'middle'} is taken"
            )
        return Placement(self.side_px, self.side_px, self.rows)
