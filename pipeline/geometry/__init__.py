"""From a page's size to the model's size, grid and token count.

Plain integers, no imaging library: the same numbers are needed where a job is planned, where
pages are encoded and where a report is written. One file per rule.
"""

from pipeline.geometry.placement import (
    AspectRatioError,
    Geometry,
    Grid,
    Placement,
    check_page_size,
)
from pipeline.geometry.smart_resize import PixelBudget, resized_size, tokens

__all__ = [
    "AspectRatioError",
    "Geometry",
    "Grid",
    "PixelBudget",
    "Placement",
    "check_page_size",
    "resized_size",
    "tokens",
]
