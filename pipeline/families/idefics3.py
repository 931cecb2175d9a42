"""Idefics3 (https://arxiv.org/abs/2408.12637): a SigLIP over square tiles, then pixel shuffle.

Dimension key: T tiles, the page as a whole among them · E side of a tile in px · P patch_size ·
S scale_factor · n = (E/(P·S))² rows per tile · R = T·n rows · O width of the language model's
input.

In the prompt each tile has a token of its place before its rows, each line of tiles a line break
after it, and the page as a whole comes last, after another line break.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint import Model, checked_settings, read_json
from pipeline.errors import CheckpointError
from pipeline.families.delivery import Delivery
from pipeline.families.processors import RESAMPLES, processor_settings, refuse_pixel_budget
from pipeline.families.transformers_family import TransformersFamily
from pipeline.geometry import SquareTiles
from pipeline.keys import EncodeSpec
from pipeline.pages import RULES

if TYPE_CHECKING:
    import torch

# Raised when the processor makes other pixels of the same page.
CONTRACT = 1

# The class defaults of transformers, which a checkpoint may leave out.
_VISION_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_IMAGE_DEFAULTS: dict[str, Any] = {
    "size": {"longest_edge": 4 * 364},
    "max_image_size": {"longest_edge": 364},
    "do_image_splitting": True,
    "resample": 1,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
}
_FAKE = "<fake_token_around_image>"
_WHOLE = "<global-img>"


@dataclass(frozen=True)
class Idefics3(TransformersFamily):
    """SmolVLM has the same design under other class names."""

    processor_class: str = "Idefics3ImageProcessor"

    # ---------------------------------------------------------------- weights

    def vision_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """All that tower and connector compute with, defaults filled in."""
        vision = checked_settings(config.get("vision_config"), _VISION_DEFAULTS, "vision_config")
        return vision | checked_settings(config, {"scale_factor": 2}, "config.json")

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
        kinds = (self.processor_class, f"{self.processor_class}Fast")
        p = processor_settings(model, _IMAGE_DEFAULTS, kinds)
        edges = [p[name].get("longest_edge") for name in ("size", "max_image_size")]
        if any(type(edge) is not int or edge < 1 for edge in edges):
            raise CheckpointError(f"image processor of `{model.name}`: size has no longest_edge")
        longest_edge_px, tile_px = edges
        tile_tokens = self._tile_tokens(model, tile_px)
        return EncodeSpec(
            family=self.name,
            processor=f"{self.processor_class}/torchvision",
            contract=CONTRACT,
            geometry=SquareTiles(longest_edge_px, tile_px, tile_tokens, p["do_image_splitting"]),
            resample=RESAMPLES[p["resample"]],
            rescale_factor=float(p["rescale_factor"]),
            image_mean=tuple(map(float, p["image_mean"])),
            image_std=tuple(map(float, p["image_std"])),
            precision=precision,
            dtype="bfloat16",
            rules=RULES,
        )

    def _tile_tokens(self, model: Model, tile_px: int) -> int:
        """n, on which tower and processor must agree."""
        c = self.vision_config(model.config)
        side = tile_px // max(c["patch_size"], 1) // max(c["scale_factor"], 1)
        path = model.path / "processor_config.json"
        given = read_json(path) if path.is_file() else {}
        joint = checked_settings(given, {"image_seq_len": 169}, f"processor of `{model.name}`")
        if not side or side * side != joint["image_seq_len"]:
            raise CheckpointError(
                f"`{model.name}`: the tower makes {side * side} rows of a tile of {tile_px} px, "
                f"the processor expects {joint['image_seq_len']}",
                "processor_config.json and config.json do not belong together",
            )
        return side * side

    def placeholder(
        self, model: Model, spec: EncodeSpec, height_px: int, width_px: int
    ) -> tuple[str | int, ...]:
        """n rows after each tile's token, and after that of the page as a whole."""
        assert isinstance(spec.geometry, SquareTiles)
        g, placed = spec.geometry, spec.geometry.place(height_px, width_px)
        if placed.tiles == 1:
            return (f"{_FAKE}{_WHOLE}", g.tile_tokens, _FAKE)
        pieces: list[str | int] = []
        before = ""
        for row in range(1, placed.height_px // g.tile_px + 1):
            for column in range(1, placed.width_px // g.tile_px + 1):
                pieces += [f"{before}{_FAKE}<row_{row}_col_{column}>", g.tile_tokens]
                before = ""
            before = "\n"
        return (*pieces, f"\n\n{_FAKE}{_WHOLE}", g.tile_tokens, _FAKE)

    # ---------------------------------------------------------------- tower

    def warnings(self, model: Model) -> tuple[str, ...]:
        """How vLLM's native path counts tiles; it normalises with the processor here."""
        geometry = self.encode_spec(model).geometry
        assert isinstance(geometry, SquareTiles)
        if not geometry.splitting or geometry.longest_edge_px % geometry.tile_px == 0:
            return ()
        return (
            f"pages of {geometry.longest_edge_px} px are no whole tiles of {geometry.tile_px} px: "
            "vLLM's native path miscounts the tiles of some pages and fails",
        )

    def features(self, shell: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Pixels (1, T, 3, E, E) → (R, O)."""
        out = shell.model.get_image_features(
            inputs["pixel_values"], inputs.get("pixel_attention_mask")
        )
        rows: torch.Tensor = out.pooler_output  # (T, n, O)
        return rows.flatten(0, 1)


FAMILY = Idefics3(
    name="idefics3",
    shell="Idefics3ForConditionalGeneration",
    prefixes=(
        ("model.vision_model.", "vision_model."),
        ("model.connector.", "connector."),
    ),
    parts=("vision_model.", "connector."),
    delivery=Delivery.PROMPT,
)
