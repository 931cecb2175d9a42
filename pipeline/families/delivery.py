"""How an engine without its tower is handed a page's embedding."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint import Model
from pipeline.jobs import cache_part
from pipeline.keys import EncodeSpec

if TYPE_CHECKING:
    from pipeline.families import Family
    from pipeline.store import Footer


class Delivery(StrEnum):
    """What vLLM's model class takes in place of an image."""

    GRID = "grid"  # image_embeds with image_grid_thw, in patches: M-RoPE positions need it
    ROWS = "rows"  # the tensor alone
    SIZES = "sizes"  # image_embeds with image_sizes, (width, height) of the source
    PROMPT = "prompt"  # nothing; the rows stand in the prompt's own embeddings


def reference_part(
    footer: Footer, family: Family, model: Model, spec: EncodeSpec
) -> dict[str, Any]:
    """The content part that refers to a cache entry, in the form that the family's engine takes.

    A part of a PROMPT family carries `placeholder`: text pieces and runs of rows, see
    `Family.placeholder`.
    """
    match family.delivery:
        case Delivery.GRID:
            return cache_part(footer.key, image_grid_thw=list(footer.grid or ()))
        case Delivery.SIZES:
            size = [footer.source_width_px, footer.source_height_px]
            return cache_part(footer.key, image_sizes=size)
        case Delivery.ROWS:
            return cache_part(footer.key)
        case Delivery.PROMPT:
            source = (footer.source_height_px, footer.source_width_px)
            pieces = family.placeholder(model, spec, *source)
            return cache_part(footer.key) | {"placeholder": list(pieces)}
