"""What a geometry says of a page: its size at the model, its grid, its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

Grid = tuple[int, int, int]


class AspectRatioError(ValueError):
    """One side of the page is so much longer than the other that the model's processor refuses."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A page at the model.

    `height_px` and `width_px` are its size after resizing (of the canvas, where it is cut into
    `tiles`); `tokens` the rows of its embedding; `grid` (1, rows, columns) of patches,
    `image_grid_thw` in the model's words, None for a model with 1-D positions.
    """

    height_px: int
    width_px: int
    tokens: int
    grid: Grid | None = None
    tiles: int = 1


class Geometry(Protocol):
    """How a model's image processor sizes pages: a frozen dataclass of all that decides it.

    `kind` names the rule, so that two rules with equal numbers have different cache keys.
    """

    @property
    def kind(self) -> str:
        """Name of the rule."""

    def place(self, height_px: int, width_px: int) -> Placement:
        """The place of a page of this size; raises AspectRatioError for one that is refused."""


def check_page_size(height_px: int, width_px: int) -> None:
    """A page without pixels is a broken program."""
    if height_px < 1 or width_px < 1:
        raise ValueError(f"a page has at least 1 x 1 px, got {height_px} x {width_px}")
