"""From a page's size to the model's size, grid and token count.

Plain integers, no imaging library: the same numbers are needed where a job is planned, where
pages are encoded and where a report is written. One file per rule.
"""

from pipeline.geometry.any_resolution import AnyResolution
from pipeline.geometry.enlarging_resize import EnlargingBudget
from pipeline.geometry.fixed_size import FixedSize
from pipeline.geometry.frame_resize import FrameBudget
from pipeline.geometry.grid_tiles import GridTiles
from pipeline.geometry.longest_edge import LongestEdge
from pipeline.geometry.page_slices import PageSlices
from pipeline.geometry.placement import (
    AspectRatioError,
    Geometry,
    Grid,
    Placement,
    check_page_size,
)
from pipeline.geometry.shaped_canvas import ShapedCanvas
from pipeline.geometry.smart_resize import PixelBudget, resized_size, tokens
from pipeline.geometry.square_tiles import SquareTiles

__all__ = [
    "AnyResolution",
    "AspectRatioError",
    "EnlargingBudget",
    "FixedSize",
    "FrameBudget",
    "Geometry",
    "Grid",
    "GridTiles",
    "LongestEdge",
    "PageSlices",
    "PixelBudget",
    "Placement",
    "ShapedCanvas",
    "SquareTiles",
    "check_page_size",
    "resized_size",
    "tokens",
]
