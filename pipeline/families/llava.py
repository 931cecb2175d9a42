"""LLaVA 1.5 (https://arxiv.org/abs/2310.03744): CLIP or SigLIP, and two linear layers.

Dimension key: E px side of the square that every page becomes · P patch_size · N = (E/P)² patches ·
L number of layers that are projected · D hidden_size of the tower · O width of the language
model's input · R rows: N, or one more with CLIP's class token kept ("full").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint import Model, checked_settings, vision_places
from pipeline.errors import CheckpointError
from pipeline.families.delivery import Delivery
from pipeline.families.processors import (
    RESAMPLES,
    given_settings,
    processor_settings,
    refuse_pixel_budget,
)
from pipeline.families.transformers_family import TransformersFamily
from pipeline.geometry import FixedSize
from pipeline.keys import EncodeSpec
from pipeline.pages import RULES

if TYPE_CHECKING:
    import torch

# Raised when the processor makes other pixels of the same page.
CONTRACT = 1

_CLIP, _SIGLIP = "clip_vision_model", "siglip_vision_model"
_HEAD = "vision_tower.head."
# The class defaults of transformers, which a checkpoint may leave out.
_TOWER_DEFAULTS: dict[str, dict[str, Any]] = {
    _CLIP: {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_channels": 3,
        "image_size": 224,
        "patch_size": 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
    _SIGLIP: {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_channels": 3,
        "image_size": 224,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
}
# LLaVA's own default where config.json has no vision_config at all: CLIP-L at 336 px.
_NO_VISION_CONFIG: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
_CONNECTOR_DEFAULTS: dict[str, Any] = {
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
    "vision_feature_select_strategy": "default",
}
NORMAL_DEFAULTS: dict[str, Any] = {
    "resample": 3,
    "rescale_factor": 1 / 255,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
}
CLIP_DEFAULTS: dict[str, Any] = NORMAL_DEFAULTS | {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "do_center_crop": True,
}
_IMAGE_DEFAULTS: dict[str, dict[str, Any]] = {
    "CLIPImageProcessor": CLIP_DEFAULTS,
    "LlavaImageProcessor": CLIP_DEFAULTS | {"do_pad": False},
    "SiglipImageProcessor": NORMAL_DEFAULTS
    | {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "do_center_crop": False},
}


@dataclass(frozen=True)
class Llava(TransformersFamily):
    """llava-hf's checkpoints and what was made of them; also the base of LLaVA-NeXT."""

    # ---------------------------------------------------------------- weights

    def weight_name(self, name: str) -> str | None:
        """As the prefixes say, but for what no row is made of.

        Those are SigLIP's pooling head, and a table of numbers that old files hold.
        """
        found = TransformersFamily.weight_name(self, name)
        unused = found and (found.startswith(_HEAD) or found.endswith(".position_ids"))
        return None if unused else found

    def vision_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """All that tower and connector compute with, defaults filled in."""
        kind, given = tower_kind(config), config.get("vision_config")
        defaults = _TOWER_DEFAULTS[kind]
        if given is None:
            given, defaults = {}, defaults | _NO_VISION_CONFIG
        tower = checked_settings(given, defaults, "vision_config")
        connector = checked_settings(config, _CONNECTOR_DEFAULTS, "config.json")
        layers = {"vision_feature_layer": _layers(config, tower["num_hidden_layers"])}
        return {"model_type": kind} | tower | connector | layers

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
        kind = given_settings(model).get("image_processor_type", "CLIPImageProcessor")
        kind = str(kind).removesuffix("Fast")
        kinds = [name + ending for name in _IMAGE_DEFAULTS for ending in ("", "Fast")]
        p = processor_settings(model, _IMAGE_DEFAULTS.get(kind, CLIP_DEFAULTS), kinds)
        return EncodeSpec(
            family=self.name,
            processor=f"{kind}/torchvision",
            contract=CONTRACT,
            geometry=self._geometry(model, kind, p),
            resample=RESAMPLES[p["resample"]],
            rescale_factor=float(p["rescale_factor"]),
            image_mean=tuple(map(float, p["image_mean"])),
            image_std=tuple(map(float, p["image_std"])),
            precision=precision,
            dtype="bfloat16",
            rules=RULES,
        )

    def _geometry(self, model: Model, kind: str, p: Mapping[str, Any]) -> FixedSize:
        square = kind == "SiglipImageProcessor"
        scaled, shortest = scaled_side(model, square=square)
        side = cropped_side(model) if p["do_center_crop"] else scaled
        fit = "pad" if p.get("do_pad") else "crop" if shortest else "stretch"
        if fit == "crop" and not p["do_center_crop"]:
            raise CheckpointError(
                f"`{model.name}`: the image processor makes no squares",
                "switch do_center_crop on, or give its size a height and a width",
            )
        check_side(self, model, side)
        return FixedSize(side, self.tile_rows(model.config), fit, scaled)

    def tile_rows(self, config: Mapping[str, Any]) -> int:
        """R of one square."""
        c = self.vision_config(config)
        patches = (c["image_size"] // max(c["patch_size"], 1)) ** 2
        class_token = c["model_type"] == _CLIP
        dropped = c["vision_feature_select_strategy"] == "default"
        return int(patches + class_token - dropped)

    # ---------------------------------------------------------------- engine

    def warnings(self, model: Model) -> tuple[str, ...]:
        """Also of names and settings that only vLLM's own tower can't take."""
        found = list(TransformersFamily.warnings(self, model))
        stored = sorted(place.stored_name for place in vision_places(model, self).values())
        bare = [name for name in stored if ".vision_model." not in name and "_tower." in name]
        if bare:
            found.append(
                f"tensors are named as {bare[0]}, not vision_tower.vision_model.…: vLLM's native "
                "path can't load its tower from them; without the tower it starts"
            )
        return tuple(found)

    # ---------------------------------------------------------------- tower

    def make_shell(self, model: Model) -> Any:
        """Without SigLIP's pooling head, which some checkpoints have and others not."""
        vision = model.config.get("vision_config")
        if vision is None:
            return TransformersFamily.make_shell(self, model)
        headless = dict(model.config) | {"vision_config": {**vision, "vision_use_head": False}}
        return TransformersFamily.make_shell(self, replace(model, config=headless))

    def features(self, shell: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """pixel_values (1, 3, E, E) → (N, L·D) → (R, O)."""
        (rows,) = shell.model.get_image_features(pixel_values=inputs["pixel_values"]).pooler_output
        projected: torch.Tensor = rows
        return projected


def tower_kind(config: Mapping[str, Any]) -> str:
    """`model_type` of the tower; raises CheckpointError for one that is not known."""
    given = config.get("vision_config")
    kind = given.get("model_type", _CLIP) if isinstance(given, Mapping) else _CLIP
    if kind not in _TOWER_DEFAULTS:
        raise CheckpointError(
            f"vision_config is of model type {kind!r:.100}, which is not supported here",
            f"supported are {', '.join(_TOWER_DEFAULTS)}",
        )
    return str(kind)


def _layers(config: Mapping[str, Any], count: int) -> int | list[int]:
    """Which layers' outputs are projected: one, or several side by side."""
    given = config.get("vision_feature_layer", -2)
    layers = given if isinstance(given, list) else [given]
    if not layers or not all(type(n) is int and -count - 1 <= n <= count for n in layers):
        raise CheckpointError(f"config.json: vision_feature_layer can't be {given!r:.100}")
    found: int | list[int] = given
    return found


def scaled_side(model: Model, *, square: bool = False) -> tuple[int, bool]:
    """Length in px that the processor scales to, and whether only the shortest side.

    Old files have one number; it is the shortest side.
    """
    size = given_settings(model).get("size", {"height": 224} if square else {"shortest_edge": 224})
    if isinstance(size, int):
        size = {"shortest_edge": size}
    if isinstance(size, Mapping):
        if type(side := size.get("shortest_edge")) is int:
            return side, True
        if type(side := size.get("height")) is int and size.get("width", side) == side:
            return side, False
    raise CheckpointError(f"image processor of `{model.name}`: size can't be {size!r:.100}")


def cropped_side(model: Model) -> int:
    """Side in px of the square that is cut out of the middle."""
    crop = given_settings(model).get("crop_size", 224)
    if isinstance(crop, int):
        return crop
    side = crop.get("height") if isinstance(crop, Mapping) else None
    if type(side) is int and crop.get("width") == side:
        return side
    raise CheckpointError(f"image processor of `{model.name}`: crop_size can't be {crop!r:.100}")


def check_side(family: TransformersFamily, model: Model, side: int) -> None:
    """Refuse a processor whose squares do not fit the tower."""
    taken = family.vision_config(model.config)["image_size"]
    if side != taken:
        raise CheckpointError(
            f"`{model.name}`: the image processor makes squares of {side} px, the tower takes "
            f"{taken} px",
            "preprocessor_config.json and config.json do not belong together",
        )


def family_for(model: Model) -> TransformersFamily:
    """Pixtral in transformers' format is a LLaVA by its model type, with other rules."""
    vision = model.config.get("vision_config")
    if isinstance(vision, Mapping) and vision.get("model_type") == "pixtral":
        from pipeline.families import pixtral_hf

        return pixtral_hf.FAMILY
    return FAMILY


PREFIXES = (
    ("vision_tower.vision_model.", "vision_tower."),
    ("vision_tower.", "vision_tower."),  # as transformers 5 saves it
    ("multi_modal_projector.", "multi_modal_projector."),
    ("model.vision_tower.vision_model.", "vision_tower."),  # since transformers 4.52
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
)
FAMILY = Llava(
    name="llava",
    shell="LlavaForConditionalGeneration",
    prefixes=PREFIXES,
    parts=("vision_tower.", "multi_modal_projector."),
    delivery=Delivery.ROWS,
)
