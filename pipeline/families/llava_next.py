"""LLaVA-NeXT (1.6): CLIP or SigLIP over the tiles of one of a few canvases.

Dimension key: T tiles of E px squared · P patch_size · N = (E/P)² patches and rows of a tile ·
L number of layers that are projected · D hidden_size of the tower · h, w lines and columns of
rows that the page covers on the canvas · R = N + h·(w + 1) rows · O width of the language
model's input.

https://llava-vl.github.io/blog/2024-01-30-llava-next/. The rows: the page as a whole, then the
canvas line by line without its padding, `image_newline` at the end of each line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint import Model
from pipeline.errors import CheckpointError
from pipeline.families.delivery import Delivery
from pipeline.families.llava import (
    CLIP_DEFAULTS,
    PREFIXES,
    Llava,
    check_side,
    cropped_side,
    scaled_side,
)
from pipeline.families.processors import (
    RESAMPLES,
    given_settings,
    processor_settings,
    refuse_pixel_budget,
)
from pipeline.geometry import AnyResolution
from pipeline.keys import EncodeSpec
from pipeline.pages import RULES

if TYPE_CHECKING:
    import torch

# Raised when the processor makes other pixels of the same page.
CONTRACT = 1

_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


@dataclass(frozen=True)
class LlavaNext(Llava):
    """llava-hf's checkpoints, Granite Vision, and what else has model type llava_next."""

    # ---------------------------------------------------------------- weights

    def vision_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """LLaVA's, and the canvases by which the model packs its rows."""
        canvases = _canvases(config.get("image_grid_pinpoints"), "config.json")
        return Llava.vision_config(self, config) | {"image_grid_pinpoints": canvases}

    # ---------------------------------------------------------------- sizes

    def encode_spec(
        self,
        model: Model,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        precision: str = "float32",
    ) -> EncodeSpec:
        """See `Family.encode_spec`."""
        refuse_pixel_budget(self.name, min_pixels, max_pixels)
        kinds = ("LlavaNextImageProcessor", "LlavaNextImageProcessorFast")
        p = processor_settings(model, CLIP_DEFAULTS, kinds)
        return EncodeSpec(
            family=self.name,
            processor="LlavaNextImageProcessor/torchvision",
            contract=CONTRACT,
            geometry=self._geometry_of(model, p),
            resample=RESAMPLES[p["resample"]],
            rescale_factor=float(p["rescale_factor"]),
            image_mean=tuple(map(float, p["image_mean"])),
            image_std=tuple(map(float, p["image_std"])),
            precision=precision,
            dtype="bfloat16",
            rules=RULES,
        )

    def _geometry_of(self, model: Model, p: Mapping[str, Any]) -> AnyResolution:
        scaled, _ = scaled_side(model)
        tile = cropped_side(model)
        if not p["do_center_crop"] or scaled != tile:
            raise CheckpointError(
                f"`{model.name}`: the image processor cuts tiles of {tile} px and scales them to "
                f"{scaled} px",
                "supported is one size for both, with do_center_crop on",
            )
        check_side(self, model, tile)
        where = f"image processor of `{model.name}`"
        cut = _canvases(given_settings(model).get("image_grid_pinpoints"), where)
        c = self.vision_config(model.config)
        packed, side = c["image_grid_pinpoints"], tile // max(c["patch_size"], 1)
        if cut != packed or any(edge % tile for canvas in cut for edge in canvas):
            raise CheckpointError(
                f"`{model.name}`: image_grid_pinpoints are {cut} in the image processor, {packed} "
                f"in config.json, with tiles of {tile} px",
                "both must be the same whole tiles",
            )
        if self.tile_rows(model.config) != side**2:
            raise CheckpointError(
                f"`{model.name}`: vision_feature_select_strategy "
                f"{c['vision_feature_select_strategy']!r} leaves no square of rows of a tile",
                "it is 'default' with CLIP and 'full' with SigLIP",
            )
        return AnyResolution(tile, side, tuple((height, width) for height, width in cut))

    # ---------------------------------------------------------------- tower

    def features(self, shell: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """pixel_values (1, T, 3, E, E), image_sizes (1, 2) → (T, N, L·D) → (T, N, O) → (R, O)."""
        found = shell.model.get_image_features(inputs["pixel_values"], inputs["image_sizes"])
        (rows,) = found.pooler_output
        packed: torch.Tensor = rows
        return packed


def _canvases(given: Any, where: str) -> list[list[int]]:
    """[height, width] of each canvas; the class default where there is none."""
    canvases = _PINPOINTS if given is None else given
    if not isinstance(canvases, list) or not canvases or not all(map(_is_size, canvases)):
        raise CheckpointError(f"{where}: image_grid_pinpoints can't be {given!r:.100}")
    return [list(canvas) for canvas in canvases]


def _is_size(canvas: Any) -> bool:
    pair = isinstance(canvas, list) and len(canvas) == 2
    return pair and all(type(edge) is int and edge > 0 for edge in canvas)


FAMILY = LlavaNext(
    name="llava_next",
    shell="LlavaNextForConditionalGeneration",
    prefixes=(
        *PREFIXES,
        ("image_newline", "image_newline"),
        ("model.image_newline", "image_newline"),
    ),
    parts=("vision_tower.", "multi_modal_projector.", "image_newline"),
    delivery=Delivery.ROWS,
    patches=("vllm.model_executor.models.llava_next",),
)
