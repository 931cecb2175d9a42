"""MiniCPM-V 4.6: SigLIP over a page and its slices, merged by windows inside and at the end.

Dimension key: T slices, the page as a whole first · h_t, w_t patches of slice t · P patch_size ·
N = Σ h_t·w_t · M patches of a row: 16, or 4 in mode "4x" · R = N/M rows · O width of the language
model's input.

In the prompt the page and each slice have marks of their own around their rows; vLLM writes them
by the source's size, which therefore goes with the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint import Model, checked_settings
from pipeline.errors import CheckpointError
from pipeline.families.delivery import Delivery
from pipeline.families.processors import RESAMPLES, processor_settings, refuse_pixel_budget
from pipeline.families.transformers_family import TransformersFamily
from pipeline.geometry import PageSlices
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
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_CONNECTOR_DEFAULTS: dict[str, Any] = {"insert_layer_id": 6, "downsample_mode": "16x"}
# What vLLM computes, whatever config.json says.
_FIXED: dict[str, Any] = {
    "drop_vision_last_layer": False,
    "merge_kernel_size": [2, 2],
    "merger_times": 1,
}
_IMAGE_DEFAULTS: dict[str, Any] = {
    "max_slice_nums": 9,
    "scale_resolution": 448,
    "patch_size": 14,
    "slice_mode": True,
    "downsample_mode": "16x",
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
}
_MERGED = {"16x": 16, "4x": 4}


@dataclass(frozen=True)
class MiniCPMV46(TransformersFamily):
    """OpenBMB's; the language model is Qwen3.5's hybrid."""

    # ---------------------------------------------------------------- weights

    def vision_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """All that tower and mergers compute with, defaults filled in."""
        given = config.get("vision_config")
        vision = checked_settings({} if given is None else given, _VISION_DEFAULTS, "vision_config")
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
        kinds = ("MiniCPMV4_6ImageProcessor", "MiniCPMV4_6ImageProcessorFast")
        p = processor_settings(model, _IMAGE_DEFAULTS, kinds)
        self._refuse_other_merging(model, p)
        return EncodeSpec(
            family=self.name,
            processor="MiniCPMV4_6ImageProcessor/torchvision",
            contract=CONTRACT,
            geometry=PageSlices(
                patch_px=p["patch_size"],
                scale_px=p["scale_resolution"],
                max_slices=p["max_slice_nums"],
                merge=_MERGED[p["downsample_mode"]],
            ),
            resample=RESAMPLES[p["resample"]],
            rescale_factor=float(p["rescale_factor"]),
            image_mean=tuple(map(float, p["image_mean"])),
            image_std=tuple(map(float, p["image_std"])),
            precision=precision,
            dtype="bfloat16",
            rules=RULES,
        )

    def _refuse_other_merging(self, model: Model, p: Mapping[str, Any]) -> None:
        """Raise CheckpointError where processor, tower and vLLM would not count the same rows."""
        c = self.vision_config(model.config)
        window = (model.config.get("vision_config") or {}).get("window_kernel_size", [2, 2])
        odd = [name for name, value in _FIXED.items() if model.config.get(name, value) != value]
        if list(window) != [2, 2]:
            odd.append("window_kernel_size")
        if not p["slice_mode"]:
            odd.append("slice_mode")
        if p["downsample_mode"] not in _MERGED or p["downsample_mode"] != c["downsample_mode"]:
            odd.append("downsample_mode")
        if not 0 <= c["insert_layer_id"] < c["num_hidden_layers"]:
            odd.append("insert_layer_id")
        if p["patch_size"] != c["patch_size"] or 0 in (p["patch_size"], p["scale_resolution"]):
            odd.append("patch_size")
        if odd:
            raise CheckpointError(
                f"`{model.name}` has settings by which vLLM and transformers differ, or processor "
                f"and tower: {', '.join(odd)}",
                "supported are those of the released checkpoints",
            )

    # ---------------------------------------------------------------- tower

    def features(self, shell: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """pixel_values (1, 3, P, N·P), target_sizes (T, 2) → T × (h_t·w_t/M, O) → (R, O)."""
        import torch

        found = shell.model.get_image_features(inputs["pixel_values"], inputs["target_sizes"])
        return torch.cat(tuple(found.pooler_output))


FAMILY = MiniCPMV46(
    name="minicpmv4_6",
    shell="MiniCPMV4_6ForConditionalGeneration",
    prefixes=(
        ("model.vision_tower.", "vision_tower."),
        ("model.merger.", "merger."),
        ("model.vpm.", "vision_tower."),  # before transformers 5.7
        ("model.vit_merger.", "vision_tower.vit_merger."),
    ),
    parts=("vision_tower.", "merger."),
    delivery=Delivery.SIZES,
    modalities=("image", "video"),
    patches=("vllm.model_executor.models.minicpmv4_6",),
    cpu_dtype="bfloat16",
)
