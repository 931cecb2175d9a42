"""PaddleOCR-VL: a SigLIP tower at the page's own shape (https://arxiv.org/abs/2510.14528).

Dimension key: H, W page in px · P patch_size · M spatial_merge_size · N = H/P · W/P patches ·
R = N/M² rows (tokens) · D hidden_size of the tower · C channels · O width of the language model's
input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint import Model, checked_settings, vision_tensors
from pipeline.errors import CheckpointError
from pipeline.families import qwen_processor
from pipeline.families.delivery import Delivery
from pipeline.families.processors import RESAMPLES, given_settings, processor_settings
from pipeline.families.qwen_vision import QwenTower, linear, norm
from pipeline.families.shell import build_shell, fill_shell
from pipeline.families.transformers_family import TransformersFamily
from pipeline.geometry import EnlargingBudget, Placement
from pipeline.keys import EncodeSpec
from pipeline.pages import RULES

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

# Raised when `PROCESSOR` makes other pixels of the same page: the golden table of its test changes.
CONTRACT = 1
PROCESSOR = "PaddleOCRVLImageProcessor/torchvision"
_KINDS = tuple(f"PaddleOCRVLImageProcessor{backend}" for backend in ("", "Fast", "Pil"))
_UNUSED = ("visual.vision_model.head.", "visual.vision_model.embeddings.packing_position_")

# The class defaults of transformers, which a checkpoint may leave out.
_VISION: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 384,
    "patch_size": 14,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "spatial_merge_size": 2,
}
_PROCESSOR: dict[str, Any] = {
    "size": {"shortest_edge": 384 * 384, "longest_edge": 1536 * 1536},
    "patch_size": 14,
    "temporal_patch_size": 1,
    "merge_size": 2,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
}


@dataclass(frozen=True)
class PaddleOCRVL(TransformersFamily):
    """Embeddings (R, O): the tower's patches, merged and projected outside of it."""

    # ---------------------------------------------------------------- weights

    def weight_name(self, name: str) -> str | None:
        """SigLIP's pooling head and a second table of positions are stored, and used by nobody."""
        ours = super().weight_name(name)
        return None if ours is None or ours.startswith(_UNUSED) else ours

    def vision_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that tower and projector compute with, defaults filled in."""
        given = config.get("vision_config") or {}
        rope = given.get("rope_parameters") or {}
        rope = checked_settings(rope, {"rope_theta": 10000.0}, "rope_parameters")
        return checked_settings(given, _VISION, "vision_config") | {
            "rope_theta": float(rope["rope_theta"]),
            "align_corners": False,  # see `make_shell`
        }

    def expected_shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Every tensor of `PaddleOCRVisionModel` and `PaddleOCRProjector` with its shape."""
        c = self.vision_config(config)
        wide, inner, patch = c["hidden_size"], c["intermediate_size"], c["patch_size"]
        merged = wide * c["spatial_merge_size"] ** 2
        tower = "visual.vision_model"
        shapes: dict[str, tuple[int, ...]] = {
            f"{tower}.embeddings.patch_embedding.weight": (wide, c["num_channels"], patch, patch),
            f"{tower}.embeddings.patch_embedding.bias": (wide,),
            f"{tower}.embeddings.position_embedding.weight": (
                (c["image_size"] // max(patch, 1)) ** 2,
                wide,
            ),
        }
        for layer in range(c["num_hidden_layers"]):
            block = f"{tower}.encoder.layers.{layer}"
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                shapes |= linear(f"{block}.self_attn.{name}", wide, wide)
            shapes |= norm(f"{block}.layer_norm1", wide) | norm(f"{block}.layer_norm2", wide)
            shapes |= linear(f"{block}.mlp.fc1", wide, inner)
            shapes |= linear(f"{block}.mlp.fc2", inner, wide)
        shapes |= norm(f"{tower}.post_layernorm", wide) | norm("projector.pre_norm", wide)
        shapes |= linear("projector.linear_1", merged, merged)
        return shapes | linear("projector.linear_2", merged, self.text_hidden_size(config))

    # ---------------------------------------------------------------- sizes

    def text_hidden_size(self, config: Mapping[str, Any]) -> int:
        """O; on the hub the text's settings stand at the top of config.json."""
        given = config.get("text_config")
        text = config if given is None else given
        return int(checked_settings(text, {"hidden_size": 1024}, "text_config")["hidden_size"])

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
        c = self.vision_config(model.config) | {"temporal_patch_size": 1}
        qwen_processor.check_patches(model, p, c)
        size = p["size"]
        budget = EnlargingBudget(
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

    def native_settings(self, spec: EncodeSpec) -> dict[str, Any]:
        """vLLM's processor must be told of a budget that is not the checkpoint's own."""
        return {"size": qwen_processor.size_of(spec)}

    # ---------------------------------------------------------------- pixels and tower

    def resize(
        self, rgb: NDArray[np.uint8], placement: Placement, spec: EncodeSpec
    ) -> NDArray[np.uint8]:
        """(H0, W0, 3) → (H, W, 3), equal to the processor's own."""
        return qwen_processor.resize(rgb, placement, spec)

    def load_tower(self, model: Model, precision: str = "float32") -> QwenTower:
        """Tower and projector, every weight assigned by name, and the checkpoint's processor."""
        import torch

        shell = build_shell(model, lambda: self.make_shell(model))
        weights = vision_tensors(model, self, getattr(torch, precision))
        fill_shell(model, shell, weights, self.parts, self.shell_prefix)
        return QwenTower(self, shell, self.make_processor(model))

    def make_shell(self, model: Model) -> Any:
        """The whole model, its positions interpolated as vLLM does it.

        transformers 5.19 puts the corners of the table on the corners of the page, vLLM 0.32
        (and PaddlePaddle's own code, which the model was published with) half a patch further in.
        """
        shell = super().make_shell(model)
        embeddings = shell.model.visual.vision_model.embeddings
        if not isinstance(getattr(embeddings, "interpolation_align_corners", None), bool):
            raise AttributeError("this transformers interpolates positions in an unknown way")
        embeddings.interpolation_align_corners = False
        return shell

    def make_processor(self, model: Model) -> Any:
        """The checkpoint's image processor, with the settings that were checked."""
        from transformers import PaddleOCRVLImageProcessor

        return PaddleOCRVLImageProcessor(**_processor_config(model))

    def features(self, shell: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """pixel_values (N, C, P, P) and grid (1, 3) → (R, O)."""
        out = shell.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        (rows,) = out.pooler_output
        return rows


def _processor_config(model: Model) -> dict[str, Any]:
    """The processor's settings with class defaults filled in, as transformers resolves them.

    min_pixels and max_pixels (as on the hub) override `size`, edge by edge.
    """
    given = given_settings(model)
    settings = processor_settings(model, _PROCESSOR, _KINDS)
    size = dict(settings["size"])
    for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if given.get(old) is not None:
            size[new] = given[old]
    for edge in _PROCESSOR["size"]:
        if type(size.get(edge)) is not int:
            raise CheckpointError(f"image processor of `{model.name}`: size has no {edge}")
    return settings | {"size": {edge: size[edge] for edge in _PROCESSOR["size"]}}


FAMILY = PaddleOCRVL(
    "paddleocr_vl",
    "PaddleOCRVLForConditionalGeneration",
    prefixes=(
        ("visual.", "visual."),
        ("mlp_AR.", "projector."),
        ("model.visual.", "visual."),
        ("model.projector.", "projector."),
    ),
    parts=("visual.", "projector."),
    delivery=Delivery.GRID,
    modalities=("image",),
    patches=("vllm.model_executor.models.paddleocr_vl", "vllm.model_executor.models.qwen2_vl"),
)
