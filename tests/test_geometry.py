"""Sizes, grids and token counts equal those of the installed processor."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import UsageError
from pipeline.geometry import (
    AspectRatioError,
    PixelBudget,
    resized_size,
)

QWEN3_VL = PixelBudget(16, 2, 65_536, 16_777_216)
QWEN2_5_VL = PixelBudget(14, 2, 3_136, 12_845_056)
TINY_READER = PixelBudget(16, 2, 1_024, 1_048_576)

# (height, width) of a page, budget, (height, width) at model size
LITERAL = [
    ((1, 1), QWEN3_VL, (256, 256)),
    ((1, 1), QWEN2_5_VL, (56, 56)),
    ((2, 2), QWEN2_5_VL, (56, 56)),
    ((30, 305), QWEN3_VL, (96, 832)),
    ((30, 305), QWEN2_5_VL, (28, 308)),
    ((1400, 1000), QWEN3_VL, (1408, 992)),
    ((1400, 1000), QWEN2_5_VL, (1400, 1008)),
    ((15420, 690), QWEN2_5_VL, (15428, 700)),  # one resize, no thumbnail before it
    ((2829, 2000), QWEN2_5_VL, (2828, 1988)),
    ((2829, 2000), QWEN3_VL, (2816, 1984)),
    ((450, 600), QWEN2_5_VL, (448, 588)),
    ((3300, 2550), PixelBudget(14, 2, 3_136, 200_000), (504, 392)),
    # halves go to the even neighbour, as Python rounds
    ((48, 80), TINY_READER, (64, 64)),
    ((112, 144), TINY_READER, (128, 128)),
    ((1024, 1024), TINY_READER, (1024, 1024)),
    ((2048, 2048), TINY_READER, (1024, 1024)),
    ((200, 40_000), PixelBudget(16, 2, 1_024, 16_777_216), (192, 40_000)),
]


@pytest.mark.parametrize(("page", "budget", "expected"), LITERAL)
def test_size_at_model(
    page: tuple[int, int], budget: PixelBudget, expected: tuple[int, int]
) -> None:
    assert resized_size(*page, budget) == expected


budgets = st.builds(
    lambda patch, merge, low, span: PixelBudget(
        patch, merge, low, max(low + span, (patch * merge) ** 2)
    ),
    st.sampled_from([14, 16]),
    st.sampled_from([1, 2]),
    st.integers(1, 200_000),
    st.integers(0, 17_000_000),
)


def installed(height: int, width: int, budget: PixelBudget) -> tuple[int, int] | None:
    """What the processor's own `smart_resize` chooses; None where it refuses."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    try:
        return smart_resize(height, width, budget.factor, budget.min_pixels, budget.max_pixels)
    except ValueError:
        return None


def ours(height: int, width: int, budget: PixelBudget) -> tuple[int, int] | None:
    try:
        return resized_size(height, width, budget)
    except AspectRatioError:
        return None


@settings(max_examples=1500, deadline=None)
@given(st.integers(1, 20_000), st.integers(1, 20_000), budgets)
def test_any_size_and_budget_as_installed(height: int, width: int, budget: PixelBudget) -> None:
    assert ours(height, width, budget) == installed(height, width, budget)


@settings(max_examples=600, deadline=None)
@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 60), budgets)
def test_ties_and_exact_ratios_as_installed(
    rows: int, columns: int, scale: int, budget: PixelBudget
) -> None:
    """Halves of a token, and pages that are an exact multiple of the budget."""
    half = budget.factor // 2
    assert ours(rows * half, columns * half, budget) == installed(
        rows * half, columns * half, budget
    )
    exact = PixelBudget(budget.patch_size, budget.merge_size, 1, (rows + 1) * budget.factor**2)
    side = (rows + 1) * scale
    assert ours(side, columns * scale, exact) == installed(side, columns * scale, exact)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.integers(-3, 3), st.booleans())
def test_the_limit_of_the_aspect_ratio_as_installed(short: int, over: int, tall: bool) -> None:
    size = (200 * short + over, short) if tall else (short, 200 * short + over)
    assert ours(*size, TINY_READER) == installed(*size, TINY_READER)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), budgets)
def test_rows_are_what_the_processor_counts(height: int, width: int, budget: PixelBudget) -> None:
    from transformers import Qwen2VLImageProcessor

    if ours(height, width, budget) is None:
        return
    processor = Qwen2VLImageProcessor(
        patch_size=budget.patch_size,
        merge_size=budget.merge_size,
        size={"shortest_edge": budget.min_pixels, "longest_edge": budget.max_pixels},
    )
    placement = budget.place(height, width)
    assert placement.grid is not None
    patches = processor.get_number_of_image_patches(height, width)
    assert math.prod(placement.grid) == patches
    assert placement.tokens == patches // budget.merge_size**2 > 0


@pytest.mark.parametrize("size", [(8192, 8), (1, 65_537), (1, 201)])
def test_a_page_too_long_is_refused_with_its_ratio(size: tuple[int, int]) -> None:
    ratio = max(size) / min(size)
    with pytest.raises(AspectRatioError, match=f"aspect ratio {ratio:.1f} of "):
        QWEN3_VL.place(*size)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ((16, 2, 2000, 1999), "min_pixels 2000 is above max_pixels 1999"),
        ((16, 2, 1, 1023), "max_pixels 1023 does not hold one token of 32 x 32 px"),
        ((16, 2, 0, 4096), "min_pixels must be at least 1, got 0"),
    ],
)
def test_an_impossible_budget_is_refused(budget: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(UsageError, match="min_pixels 1000000000 is above 100,000,000"):
        PixelBudget(16, 2, 10**9, 10**400)
    with pytest.raises(UsageError) as error:
        PixelBudget(*budget)
    assert error.value.message == message


def test_a_page_without_pixels_is_no_page() -> None:
    with pytest.raises(ValueError, match="at least 1 x 1 px"):
        resized_size(0, 10, QWEN3_VL)
