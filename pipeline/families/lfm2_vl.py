"""LFM2-VL: a SigLIP 2 over tiles and a thumbnail, four patches to a row.

Dimension key: H, W page (or thumbnail) in px · T tiles of E px squared · P encoder_patch_size ·
F downsample_factor · R = (H/(P·F))·(W/(P·F)) + T·(E/(P·F))² rows · O width of the language
model's input.

In the prompt each tile has a token of its place before its rows, the thumbnail one of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint import Model, checked_settings, vision_places
from pipeline.errors import CheckpointError
from pipeline.families.delivery import Delivery
from pipeline.families.processors import RESAMPLES, processor_settings, refuse_pixel_budget
from pipeline.families.transformers_family import TransformersFamily
from pipeline.geometry import GridTiles
from pipeline.keys import EncodeSpec
from pipeline.pages import RULES

if TYPE_CHECKING:
    import torch

# Raised when the processor makes other pixels of the same page.
CONTRACT = 1

# The class defaults of transformers, which a checkpoint may leave out.
_VISION_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "num_patches": 256,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_CONNECTOR_DEFAULTS: dict[str, Any] = {
    "downsample_factor": 2,
    "projector_hidden_act": "gelu",
    "projector_hidden_size": 2560,
    "projector_bias": True,
    "projector_use_layernorm": True,
}
_IMAGE_DEFAULTS: dict[str, Any] = {
    "downsample_factor": 2,
    "do_image_splitting": True,
    "min_tiles": 2,
    "max_tiles": 10,
    "use_thumbnail": True,
    "min_image_tokens": 64,
    "max_image_tokens": 256,
    "encoder_patch_size": 16,
    "tile_size": 512,
    "max_pixels_tolerance": 2.0,
    "resample": 2,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_rescale": True,
    "do_normalize": True,
    "do_pad": True,
}
_START, _END, _THUMBNAIL = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"


@dataclass(frozen=True)
class Lfm2VL(TransformersFamily):
    """Liquid AI's; the language model is a hybrid of short convolutions and attention."""

    # ---------------------------------------------------------------- weights

    def weight_name(self, name: str) -> str | None:
        """SigLIP's pooling head, which some checkpoints have, is no part of the tower."""
        found = TransformersFamily.weight_name(self, name)
        return None if found is None or found.startswith("vision_tower.head.") else found

    def vision_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """All that tower and connector compute with, defaults filled in."""
        vision = checked_settings(config.get("vision_config"), _VISION_DEFAULTS, "vision_config")
        return vision | checked_settings(config, _CONNECTOR_DEFAULTS, "config.json")

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
        kinds = ("Lfm2VlImageProcessor", "Lfm2VlImageProcessorFast")
        p = processor_settings(model, _IMAGE_DEFAULTS, kinds)
        return EncodeSpec(
            family=self.name,
            processor="Lfm2VlImageProcessor/torchvision",
            contract=CONTRACT,
            geometry=self._geometry(model, p),
            resample=RESAMPLES[p["resample"]],
            rescale_factor=float(p["rescale_factor"]),
            image_mean=tuple(map(float, p["image_mean"])),
            image_std=tuple(map(float, p["image_std"])),
            precision=precision,
            dtype="bfloat16",
            rules=RULES,
        )

    def _geometry(self, model: Model, p: Mapping[str, Any]) -> GridTiles:
        c = self.vision_config(model.config)
        cut = (p["encoder_patch_size"], p["downsample_factor"])
        taken = (c["patch_size"], c["downsample_factor"])
        if cut != taken or 0 in cut or p["tile_size"] % (cut[0] * cut[1]) or not p["do_pad"]:
            raise CheckpointError(
                f"`{model.name}`: the image processor cuts tiles of {p['tile_size']} px into "
                f"patches of {cut[0]} px for {cut[1]} x {cut[1]} merging, the tower takes "
                f"patches of {taken[0]} px for {taken[1]} x {taken[1]}",
                "preprocessor_config.json and config.json do not belong together",
            )
        splitting = p["do_image_splitting"]
        return GridTiles(
            patch_px=cut[0],
            downsample=cut[1],
            min_tokens=p["min_image_tokens"],
            max_tokens=p["max_image_tokens"],
            tile_px=p["tile_size"],
            min_tiles=p["min_tiles"] if splitting else 1,
            max_tiles=p["max_tiles"] if splitting else 1,
            tolerance=float(p["max_pixels_tolerance"]),
            thumbnail=p["use_thumbnail"],
        )

    def placeholder(
        self, model: Model, spec: EncodeSpec, height_px: int, width_px: int
    ) -> tuple[str | int, ...]:
        """All rows of a small page; tile by tile, then the thumbnail, of a large one."""
        assert isinstance(spec.geometry, GridTiles)
        g, placed = spec.geometry, spec.geometry.place(height_px, width_px)
        if placed.tiles == 1:
            return (_START, placed.tokens, _END)
        pieces: list[str | int] = []
        before = _START
        rows, columns = g.layout(height_px, width_px)
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                pieces += [f"{before}<|img_row_{row}_col_{column}|>", g.tile_tokens]
                before = ""
        if g.thumbnail:
            pieces += [_THUMBNAIL, placed.tokens - rows * columns * g.tile_tokens]
        return (*pieces, _END)

    # ---------------------------------------------------------------- engine and tower

    def config_overrides(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Widths of its blocks, which vLLM reads and transformers 5 no longer writes."""
        text = config.get("text_config")
        given = text if isinstance(text, Mapping) else {}
        wide = checked_settings(given, {"hidden_size": 2560}, "text_config")["hidden_size"]
        missing = {n: wide for n in ("block_dim", "conv_dim") if n not in given}
        return {"text_config": missing} if missing else {}

    def warnings(self, model: Model) -> tuple[str, ...]:
        """What vLLM's native path counts otherwise than the processor, or can't load."""
        found: list[str] = []
        geometry = self.encode_spec(model).geometry
        assert isinstance(geometry, GridTiles)
        if not geometry.thumbnail:
            found.append(
                "use_thumbnail is off: vLLM's native path expects a thumbnail all the same"
            )
        stored = sorted(place.stored_name for place in vision_places(model, self).values())
        bare = [n for n in stored if "vision_tower." in n and "vision_tower.vision_model." not in n]
        if bare:
            found.append(
                f"tensors are named as {bare[0]}, not vision_tower.vision_model.…: vLLM's native "
                "path can't load its tower from them; without the tower it starts"
            )
        return tuple(found)

    def make_shell(self, model: Model) -> Any:
        """Without the pooling head."""
        vision = {**(model.config.get("vision_config") or {}), "vision_use_head": False}
        headless = {**model.config, "vision_config": vision}
        return TransformersFamily.make_shell(self, replace(model, config=headless))

    def features(self, shell: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Patches (T, most, P·P·3) with masks and shapes → (R, O)."""
        import torch

        out = shell.model.get_image_features(
            inputs["pixel_values"], inputs["spatial_shapes"], inputs["pixel_attention_mask"]
        )
        rows: torch.Tensor = torch.cat(tuple(out.pooler_output))
        return rows


FAMILY = Lfm2VL(
    name="lfm2_vl",
    shell="Lfm2VlForConditionalGeneration",
    prefixes=(
        ("model.vision_tower.vision_model.", "vision_tower."),  # before transformers 5
        ("model.vision_tower.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ),
    parts=("vision_tower.", "multi_modal_projector."),
    delivery=Delivery.PROMPT,
    cpu_dtype="bfloat16",
)
