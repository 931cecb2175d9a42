"""GLM-4V: a ViT whose positions are interpolated to the page (https://arxiv.org/abs/2507.01006).

GLM-4.1V and GLM-4.6V-Flash. Dimension key beside that of `qwen_vision`: D hidden_size of the
tower · C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.checkpoint import Model
from pipeline.errors import CheckpointError
from pipeline.families.processors import RESAMPLES, given_settings, processor_settings
from pipeline.families.qwen_processor import check_patches
from pipeline.families.qwen_vision import QwenVision, linear, norm, patch_shape
from pipeline.geometry import FrameBudget
from pipeline.keys import EncodeSpec
from pipeline.pages import RULES

# Raised when `PROCESSOR` makes other pixels of the same page: the golden table of its test changes.
CONTRACT = 1
PROCESSOR = "Glm4vImageProcessor/torchvision"  # Glm46V's differs by name alone
_KINDS = tuple(
    f"{name}ImageProcessor{backend}"
    for name in ("Glm4v", "Glm46V")
    for backend in ("", "Fast", "Pil")
)
# The class defaults of transformers, which a checkpoint may leave out.
_PROCESSOR: dict[str, Any] = {
    "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000},
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
# What vLLM's own tower computes with, whatever config.json says.
_FIXED_IN_VLLM: dict[str, Any] = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 1e4}


@dataclass(frozen=True)
class Glm4v(QwenVision):
    """Embeddings (R, O), the merger's rows."""

    settings: ClassVar[Mapping[str, Any]] = {
        "depth": 24,
        "hidden_size": 1536,
        "hidden_act": "silu",
        "attention_bias": False,
        "num_heads": 12,
        "in_channels": 3,
        "image_size": 336,
        "patch_size": 14,
        "rms_norm_eps": 1e-5,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 4096,
        "intermediate_size": 13696,
    }

    # ---------------------------------------------------------------- weights

    def expected_shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Every tensor of `Glm4vVisionModel` with its shape."""
        c = self.vision_config(config)
        wide, out = c["hidden_size"], c["out_hidden_size"]
        positions = (c["image_size"] // max(c["patch_size"], 1)) ** 2
        shapes = frame_shapes(c)
        shapes |= {
            "embeddings.position_embedding.weight": (positions, wide),
            "post_conv_layernorm.weight": (wide,),
        }
        for layer in range(c["depth"]):
            block = f"blocks.{layer}"
            shapes |= projection(f"{block}.attn.qkv", wide, 3 * wide, bias=c["attention_bias"])
            shapes |= projection(f"{block}.attn.proj", wide, wide, bias=False)
            shapes |= gated(f"{block}.mlp", wide, out, bias=False)  # as wide as the rows
        return shapes | gated("merger", out, c["intermediate_size"], bias=False)

    # ---------------------------------------------------------------- sizes

    def encode_spec(
        self,
        model: Model,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        precision: str = "float32",
    ) -> EncodeSpec:
        """See `Family.encode_spec`; pixels count once per frame, as the processor counts them."""
        p = processor_config(model)
        check_patches(model, p, self.vision_config(model.config))
        size = p["size"]
        budget = FrameBudget(
            patch_size=p["patch_size"],
            merge_size=p["merge_size"],
            min_pixels=size["shortest_edge"] if min_pixels is None else min_pixels,
            max_pixels=size["longest_edge"] if max_pixels is None else max_pixels,
            frames=p["temporal_patch_size"],
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

    def warnings(self, model: Model) -> tuple[str, ...]:
        """Those of the Qwen kind, and settings that are passed over."""
        c, given = self.vision_config(model.config), given_settings(model)
        return (
            *super().warnings(model),
            *(
                f"the image processor's JSON has {name}, which GLM's processor does not read: "
                "`size` decides"
                for name in ("min_pixels", "max_pixels")
                if given.get(name) is not None
            ),
            *(
                f"vision_config has {name} {c[name]}, vLLM's own tower computes with {value}: "
                "its native answers differ from those to embeddings"
                for name, value in _FIXED_IN_VLLM.items()
                if c[name] != value
            ),
        )

    # ---------------------------------------------------------------- tower

    def make_processor(self, model: Model) -> Any:
        """The checkpoint's image processor, with the settings that were checked."""
        from transformers import Glm4vImageProcessor

        return Glm4vImageProcessor(**processor_config(model))


def processor_config(model: Model) -> dict[str, Any]:
    """The processor's settings with class defaults filled in, as transformers resolves them.

    `size` comes whole or not at all; min_pixels and max_pixels are not read.
    """
    settings = processor_settings(model, _PROCESSOR, _KINDS)
    for edge in _PROCESSOR["size"]:
        if type(settings["size"].get(edge)) is not int:
            raise CheckpointError(f"image processor of `{model.name}`: size has no {edge}")
    return settings


def frame_shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """What the towers of this kind have in common: in front of the blocks, norms, behind them."""
    wide, out, merge = c["hidden_size"], c["out_hidden_size"], c["spatial_merge_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (wide, *patch_shape(c)),
        "patch_embed.proj.bias": (wide,),
        "post_layernorm.weight": (wide,),
        "downsample.weight": (out, wide, merge, merge),
        "downsample.bias": (out,),
        "merger.proj.weight": (out, out),
    }
    for layer in range(c["depth"]):
        shapes |= {f"blocks.{layer}.{name}.weight": (wide,) for name in ("norm1", "norm2")}
    return shapes | norm("merger.post_projection_norm", out)


def projection(name: str, inputs: int, outputs: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of a linear layer."""
    shapes = linear(name, inputs, outputs)
    return shapes if bias else {f"{name}.weight": shapes[f"{name}.weight"]}


def gated(name: str, wide: int, inner: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of a gated feed-forward layer."""
    shapes = projection(f"{name}.gate_proj", wide, inner, bias=bias)
    shapes |= projection(f"{name}.up_proj", wide, inner, bias=bias)
    return shapes | projection(f"{name}.down_proj", inner, wide, bias=bias)


FAMILY = Glm4v(
    "glm4v",
    "Glm4vVisionModel",
    patches=("vllm.model_executor.models.glm4_1v", "vllm.model_executor.models.qwen2_vl"),
    text_default=4096,
    text_at_top=True,
)
