"""Qwen3-VL: a ViT with DeepStack (https://arxiv.org/abs/2511.21631).

Dimension key: H, W page in px · P patch_size · M merge_size · T temporal_patch_size ·
N = H/P · W/P patches · R = N/M² rows (tokens) · D hidden_size · O out_hidden_size ·
K number of DeepStack layers.

The embedding of a page is (R, O·(1+K)): the merger's rows, then those of each DeepStack merger,
as vLLM splits them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint import Model, checked_settings, vision_tensors
from pipeline.errors import CheckpointError
from pipeline.families.delivery import Delivery
from pipeline.families.processors import (
    RESAMPLES,
    given_settings,
    normalisation_warnings,
    processor_settings,
)
from pipeline.families.shell import build_shell
from pipeline.geometry import PixelBudget, Placement
from pipeline.keys import EncodeSpec
from pipeline.pages import RULES

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

# Raised when `PROCESSOR` makes other pixels of the same page: the golden table of its test changes.
CONTRACT = 1
PROCESSOR = "Qwen2VLImageProcessor/torchvision"
_PROCESSOR_TYPES = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast")
_PREFIXES = ("model.visual.", "visual.")

# The class defaults of transformers, which a checkpoint may leave out.
_VISION_DEFAULTS: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_PROCESSOR_DEFAULTS: dict[str, Any] = {
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


@dataclass(frozen=True, slots=True)
class Qwen3VL:
    """The dense family; the mixture-of-experts one has the same tower under another type."""

    name: str
    config_class: str
    tower_class: str
    patches: tuple[str, ...]
    delivery: Delivery = Delivery.GRID
    modalities: tuple[str, ...] = ("image", "video")
    cpu_dtype: str | None = None

    # ---------------------------------------------------------------- weights

    def weight_name(self, name: str) -> str | None:
        """`model.visual.X` and (before transformers 4.52) `visual.X` are the tower's X."""
        for prefix in _PREFIXES:
            if name.startswith(prefix):
                return name.removeprefix(prefix)
        return None

    def vision_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that the tower computes with, defaults filled in."""
        given = config.get("vision_config") or {}
        settings = checked_settings(given, _VISION_DEFAULTS, "vision_config")
        rope = given.get("rope_parameters") or {}
        rope = checked_settings(rope, {"rope_theta": 10000.0}, "rope_parameters")
        return settings | {"rope_theta": float(rope["rope_theta"])}

    def expected_shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Every tensor of `Qwen3VLVisionModel` with its shape."""
        c = self.vision_config(config)
        wide, inner, merged = c["hidden_size"], c["intermediate_size"], _merged_width(c)
        patch = (c["in_channels"], c["temporal_patch_size"], c["patch_size"], c["patch_size"])
        shapes: dict[str, tuple[int, ...]] = {
            "patch_embed.proj.weight": (wide, *patch),
            "patch_embed.proj.bias": (wide,),
            "pos_embed.weight": (c["num_position_embeddings"], wide),
        }
        for layer in range(c["depth"]):
            block = f"blocks.{layer}"
            shapes |= _linear(f"{block}.attn.qkv", wide, 3 * wide)
            shapes |= _linear(f"{block}.attn.proj", wide, wide)
            shapes |= _linear(f"{block}.mlp.linear_fc1", wide, inner)
            shapes |= _linear(f"{block}.mlp.linear_fc2", inner, wide)
            shapes |= _norm(f"{block}.norm1", wide) | _norm(f"{block}.norm2", wide)
        mergers = {"merger": wide}
        for number in range(len(c["deepstack_visual_indexes"])):
            mergers[f"deepstack_merger_list.{number}"] = merged  # normed after the merge
        for merger, norm_width in mergers.items():
            shapes |= _norm(f"{merger}.norm", norm_width)
            shapes |= _linear(f"{merger}.linear_fc1", merged, merged)
            shapes |= _linear(f"{merger}.linear_fc2", merged, c["out_hidden_size"])
        return shapes

    # ---------------------------------------------------------------- sizes

    def row_width(self, config: Mapping[str, Any]) -> int:
        """O·(1+K)."""
        c = self.vision_config(config)
        return int(c["out_hidden_size"]) * (1 + len(c["deepstack_visual_indexes"]))

    def text_hidden_size(self, config: Mapping[str, Any]) -> int:
        """Width of the language model's input, equal to O."""
        text = checked_settings(config.get("text_config"), {"hidden_size": 4096}, "text_config")
        return int(text["hidden_size"])

    def encode_spec(
        self,
        model: Model,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        precision: str = "float32",
    ) -> EncodeSpec:
        """See `Family.encode_spec`; reads preprocessor_config.json or processor_config.json."""
        p = _processor_config(model)
        _check_patches(model, p, self.vision_config(model.config))
        size = p["size"]
        budget = PixelBudget(
            patch_size=p["patch_size"],
            merge_size=p["merge_size"],
            min_pixels=size["shortest_edge"] if min_pixels is None else min_pixels,
            max_pixels=size["longest_edge"] if max_pixels is None else max_pixels,
        )
        return EncodeSpec(
            family=self.name,
            processor=PROCESSOR,
            contract=CONTRACT,
            geometry=budget,
            resample=RESAMPLES[p["resample"]],
            rescale_factor=float(p["rescale_factor"]),
            image_mean=tuple(map(float, p["image_mean"])),
            image_std=tuple(map(float, p["image_std"])),
            precision=precision,
            dtype="bfloat16",
            rules=RULES,
        )

    def placeholder(
        self, model: Model, spec: EncodeSpec, height_px: int, width_px: int
    ) -> tuple[str | int, ...]:
        """Not asked: vLLM takes the embeddings as an image's."""
        raise NotImplementedError

    def config_overrides(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """None are needed."""
        return {}

    def native_settings(self, spec: EncodeSpec) -> dict[str, Any]:
        """vLLM's processor must be told of a budget that is not the checkpoint's own."""
        return {"size": _size_of(spec)}

    def warnings(self, model: Model) -> tuple[str, ...]:
        """See `Family.warnings`."""
        return normalisation_warnings(model)

    # ---------------------------------------------------------------- pixels and tower

    def resize(
        self, rgb: NDArray[np.uint8], placement: Placement, spec: EncodeSpec
    ) -> NDArray[np.uint8]:
        """(H0, W0, 3) → (H, W, 3) by torchvision with antialias on uint8, as in the processor."""
        import numpy as np
        import torch
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2 import functional

        channels_first = torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous()
        resized = functional.resize(
            channels_first,
            [placement.height_px, placement.width_px],
            interpolation=InterpolationMode(spec.resample),
            antialias=True,
        )
        pixels: NDArray[np.uint8] = resized.permute(1, 2, 0).contiguous().numpy()
        return pixels

    def load_tower(self, model: Model, precision: str = "float32") -> Qwen3VLTower:
        """transformers' tower on the meta device, then every weight assigned by name."""
        import torch
        import transformers

        weights = {
            name: tensor.to(getattr(torch, precision))
            for name, tensor in vision_tensors(model, self).items()
        }

        def make() -> Any:
            config = getattr(transformers, self.config_class)(**dict(model.config["vision_config"]))
            config._attn_implementation = "sdpa"  # eager attention would hold N × N scores
            return getattr(transformers, self.tower_class)(config)

        tower = build_shell(model, make)
        tower.load_state_dict(weights, strict=True, assign=True)
        processor = transformers.Qwen2VLImageProcessor(**_processor_config(model))
        return Qwen3VLTower(tower, processor)


class Qwen3VLTower:
    """A loaded tower with the checkpoint's image processor, which normalises and cuts patches."""

    def __init__(self, tower: Any, processor: Any) -> None:
        self._tower = tower
        self._processor = processor

    def encode(self, pixels: NDArray[np.uint8]) -> torch.Tensor:
        """(H, W, 3) uint8 → (R, O·(1+K)) in the tower's precision."""
        return self._run(pixels, do_resize=False)

    def encode_original(self, rgb: NDArray[np.uint8], spec: EncodeSpec) -> torch.Tensor:
        """(H0, W0, 3) uint8 → (R, O·(1+K)): the processor resizes, as on the native path."""
        return self._run(rgb, size=_size_of(spec))

    def _run(self, pixels: NDArray[np.uint8], **settings: Any) -> torch.Tensor:
        import torch

        inputs = self._processor(
            images=[pixels], input_data_format="channels_last", return_tensors="pt", **settings
        )
        with torch.inference_mode():
            # pixel_values (N, 3·T·P·P), grid (1, 3)
            out = self._tower(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
            return torch.cat([out.pooler_output, *out.deepstack_features], dim=1)


def _size_of(spec: EncodeSpec) -> dict[str, int]:
    """The pixel budget in the processor's words."""
    budget = spec.geometry
    assert isinstance(budget, PixelBudget), budget
    return {"shortest_edge": budget.min_pixels, "longest_edge": budget.max_pixels}


def _merged_width(c: Mapping[str, Any]) -> int:
    """D·M²: the patches of one token side by side."""
    return int(c["hidden_size"]) * int(c["spatial_merge_size"]) ** 2


def _linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _check_patches(model: Model, p: Mapping[str, Any], c: Mapping[str, Any]) -> None:
    """Refuse a processor whose patches do not fit the tower."""
    cut = [p["patch_size"], p["merge_size"], p["temporal_patch_size"]]
    taken = [c["patch_size"], c["spatial_merge_size"], c["temporal_patch_size"]]
    if cut != taken:
        raise CheckpointError(
            f"`{model.name}`: the image processor cuts patches {cut}, the tower takes {taken}",
            "preprocessor_config.json and config.json do not belong together",
        )


def _processor_config(model: Model) -> dict[str, Any]:
    """The image processor's settings with class defaults filled in, as transformers resolves them.

    min_pixels and max_pixels (old style) override `size`.
    """
    given = given_settings(model)
    settings = processor_settings(model, _PROCESSOR_DEFAULTS, _PROCESSOR_TYPES)
    size = dict(settings["size"])
    for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if given.get(old) is not None:
            size[new] = given[old]
    for edge in _PROCESSOR_DEFAULTS["size"]:
        if type(size.get(edge)) is not int:
            raise CheckpointError(f"image processor of `{model.name}`: size has no {edge}")
    return settings | {"size": size}


FAMILY = Qwen3VL(
    "qwen3_vl",
    "Qwen3VLVisionConfig",
    "Qwen3VLVisionModel",
    ("vllm.model_executor.models.qwen3_vl",),
)
