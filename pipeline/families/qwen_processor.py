"""The image processor of the Qwen-VL kind: its settings, its pixel budget, its resize.

Dimension key: H0, W0 page in px as decoded · H, W at model size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint import Model
from pipeline.errors import CheckpointError
from pipeline.families.processors import RESAMPLES, given_settings, processor_settings
from pipeline.geometry import PixelBudget, Placement
from pipeline.keys import EncodeSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Raised when `PROCESSOR` makes other pixels of the same page: the golden table of its test changes.
CONTRACT = 1
PROCESSOR = "Qwen2VLImageProcessor/torchvision"
# transformers loads the same class under each of these names
_KINDS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
_DEFAULTS: dict[str, Any] = {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
}
# torchvision's words for ours, as the processor picks them; it has no others for tensors
_INTERPOLATIONS = {
    "nearest": "nearest-exact",
    "lanczos": "lanczos",
    "bilinear": "bilinear",
    "bicubic": "bicubic",
}


def processor_config(model: Model) -> dict[str, Any]:
    """The processor's settings with class defaults filled in, as transformers resolves them.

    min_pixels and max_pixels (old style) override `size`, edge by edge.
    """
    given = given_settings(model)
    settings = processor_settings(model, _DEFAULTS, _KINDS)
    size = dict(settings["size"])
    for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if given.get(old) is not None:
            size[new] = given[old]
    for edge in _DEFAULTS["size"]:
        if type(size.get(edge)) is not int:
            raise CheckpointError(f"image processor of `{model.name}`: size has no {edge}")
    if RESAMPLES[settings["resample"]] not in _INTERPOLATIONS:
        raise CheckpointError(
            f"image processor of `{model.name}`: resample can't be {settings['resample']}"
        )
    return settings | {"size": size}


def check_patches(model: Model, p: Mapping[str, Any], c: Mapping[str, Any]) -> None:
    """Refuse a processor `p` whose patches do not fit the tower `c`."""
    cut = [p["patch_size"], p["merge_size"], p["temporal_patch_size"]]
    taken = [c["patch_size"], c["spatial_merge_size"], c["temporal_patch_size"]]
    if cut != taken:
        raise CheckpointError(
            f"`{model.name}`: the image processor cuts patches {cut}, the tower takes {taken}",
            "preprocessor_config.json and config.json do not belong together",
        )


def pixel_budget(
    p: Mapping[str, Any], min_pixels: int | None, max_pixels: int | None
) -> PixelBudget:
    """The budget of a processor, each limit overridden by one that is given."""
    size = p["size"]
    return PixelBudget(
        patch_size=p["patch_size"],
        merge_size=p["merge_size"],
        min_pixels=size["shortest_edge"] if min_pixels is None else min_pixels,
        max_pixels=size["longest_edge"] if max_pixels is None else max_pixels,
    )


def size_of(spec: EncodeSpec) -> dict[str, int]:
    """The pixel budget in the processor's words."""
    budget = spec.geometry
    assert isinstance(budget, PixelBudget), budget
    return {"shortest_edge": budget.min_pixels, "longest_edge": budget.max_pixels}


def resize(rgb: NDArray[np.uint8], placement: Placement, spec: EncodeSpec) -> NDArray[np.uint8]:
    """(H0, W0, 3) → (H, W, 3) by torchvision with antialias on uint8, as in the processor."""
    import numpy as np
    import torch
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional

    channels_first = torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous()
    resized = functional.resize(
        channels_first,
        [placement.height_px, placement.width_px],
        interpolation=InterpolationMode(_INTERPOLATIONS[spec.resample]),
        antialias=True,
    )
    pixels: NDArray[np.uint8] = resized.permute(1, 2, 0).contiguous().numpy()
    return pixels
