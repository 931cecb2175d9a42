"""What the vision towers of the Qwen-VL kind share: names, sizes, loading.

Dimension key, here and in each family's file: H, W page in px · P patch_size · M merge_size ·
T temporal_patch_size · N = H/P · W/P patches · R = N/M² rows (tokens) · O width of the language
model's input.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.checkpoint import Model, checked_settings, vision_tensors
from pipeline.families import qwen_processor
from pipeline.families.delivery import Delivery
from pipeline.families.processors import RESAMPLES
from pipeline.families.shell import build_shell, fill_shell
from pipeline.families.transformers_family import ProcessorTower, TransformersFamily
from pipeline.geometry import Placement
from pipeline.keys import EncodeSpec
from pipeline.pages import RULES

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


@dataclass(frozen=True)
class QwenVision(TransformersFamily):
    """A family whose `shell` is the class of the vision tower alone, merger included.

    A family's file gives the tower's `settings` (transformers' defaults, which a checkpoint may
    leave out), its shapes and its widths.
    """

    prefixes: tuple[tuple[str, str], ...] = (("model.visual.", ""), ("visual.", ""))
    parts: tuple[str, ...] = ("",)
    delivery: Delivery = Delivery.GRID
    shell_prefix: str = ""
    modalities: tuple[str, ...] = ("image", "video")
    text_default: int = 4096  # O, where the text's settings leave it out
    text_at_top: bool = False  # whether those may stand at the top of config.json, as they once did
    settings: ClassVar[Mapping[str, Any]]

    def expected_shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Every tensor of the tower with its shape."""
        raise NotImplementedError

    def vision_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that the tower computes with, defaults filled in."""
        given = config.get("vision_config") or {}
        settings = checked_settings(given, self.settings, "vision_config")
        rope = given.get("rope_parameters") or {}
        rope = checked_settings(rope, {"rope_theta": 10000.0}, "rope_parameters")
        return settings | {"rope_theta": float(rope["rope_theta"])}

    # ---------------------------------------------------------------- sizes

    def merger_width(self, config: Mapping[str, Any]) -> int:
        """Width of the merger's rows, which must be O."""
        return int(self.vision_config(config)["out_hidden_size"])

    def row_width(self, config: Mapping[str, Any]) -> int:
        """The merger's rows and nothing else."""
        return self.merger_width(config)

    def text_hidden_size(self, config: Mapping[str, Any]) -> int:
        """O."""
        given = config.get("text_config")
        if given is None and self.text_at_top:
            given = config
        text = checked_settings(given, {"hidden_size": self.text_default}, "text_config")
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
        p = qwen_processor.processor_config(model)
        qwen_processor.check_patches(model, p, self.vision_config(model.config))
        return EncodeSpec(
            family=self.name,
            processor=qwen_processor.PROCESSOR,
            contract=qwen_processor.CONTRACT,
            geometry=qwen_processor.pixel_budget(p, min_pixels, max_pixels),
            resample=RESAMPLES[p["resample"]],
            rescale_factor=float(p["rescale_factor"]),
            image_mean=tuple(map(float, p["image_mean"])),
            image_std=tuple(map(float, p["image_std"])),
            precision=precision,
            dtype="bfloat16",
            rules=RULES,
        )

    # ---------------------------------------------------------------- engine

    def native_settings(self, spec: EncodeSpec) -> dict[str, Any]:
        """vLLM's processor must be told of a budget that is not the checkpoint's own."""
        return {"size": qwen_processor.size_of(spec)}

    def warnings(self, model: Model) -> tuple[str, ...]:
        """Those of any family, and widths that do not meet."""
        found = super().warnings(model)
        rows, text = self.merger_width(model.config), self.text_hidden_size(model.config)
        if rows == text:
            return found
        return (
            *found,
            f"config.json: the tower's rows are {rows} wide, the language model takes {text}",
        )

    # ---------------------------------------------------------------- pixels and tower

    def resize(
        self, rgb: NDArray[np.uint8], placement: Placement, spec: EncodeSpec
    ) -> NDArray[np.uint8]:
        """(H0, W0, 3) → (H, W, 3), equal to the processor's own."""
        return qwen_processor.resize(rgb, placement, spec)

    def load_tower(self, model: Model, precision: str = "float32") -> QwenTower:
        """transformers' tower, every weight assigned by name, and the checkpoint's processor."""
        import torch

        shell = build_shell(model, lambda: self.make_shell(model))
        weights = vision_tensors(model, self, getattr(torch, precision))
        fill_shell(model, shell, weights, self.parts, self.shell_prefix)
        linear_patches(shell)
        return QwenTower(self, shell, self.make_processor(model))

    def make_shell(self, model: Model) -> Any:
        """The tower's class, from transformers' module of the same name as the model type."""
        module = importlib.import_module(f"transformers.models.{self.name}.modeling_{self.name}")
        tower_class = getattr(module, self.shell)
        config = tower_class.config_class(**dict(model.config.get("vision_config") or {}))
        config._attn_implementation = "sdpa"  # eager attention would hold N × N scores
        return tower_class(config)

    def make_processor(self, model: Model) -> Any:
        """The checkpoint's image processor, with the settings that were checked."""
        from transformers import Qwen2VLImageProcessor

        return Qwen2VLImageProcessor(**qwen_processor.processor_config(model))

    def features(self, shell: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """pixel_values (N, 3·T·P·P) and grid (1, 3) → (R, O), rows in the page's own order."""
        out = shell(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
        rows: torch.Tensor = out.pooler_output
        return rows


class QwenTower(ProcessorTower):
    """A loaded tower with the checkpoint's image processor, which normalises and cuts patches."""

    def encode(self, pixels: NDArray[np.uint8]) -> torch.Tensor:
        """(H, W, 3) uint8 → (R, width) in the tower's precision.

        Not resized once more: the processor's rule is no fixed point at the budget's edges.
        """
        return self._run(pixels, do_resize=False)

    def encode_original(self, rgb: NDArray[np.uint8], spec: EncodeSpec) -> torch.Tensor:
        """(H0, W0, 3) uint8 → (R, width): the processor resizes, as on the native path."""
        return self._run(rgb, size=qwen_processor.size_of(spec))

    def _run(self, pixels: NDArray[np.uint8], **settings: Any) -> torch.Tensor:
        import torch

        inputs = self._processor(
            images=[pixels], input_data_format="channels_last", return_tensors="pt", **settings
        )
        with torch.inference_mode():
            return self._family.features(self._shell, inputs)


def linear_patches(shell: Any) -> None:
    """Let the tower embed its patches by a linear layer.

    Its convolution takes each patch alone (stride = kernel), which is the same product; as a
    convolution it is many times slower on CPUs
    (https://github.com/huggingface/transformers/issues/45750).
    """
    import torch

    class PatchLinear(torch.nn.Linear):
        def forward(self, patches: torch.Tensor) -> torch.Tensor:
            """(N, channels, T, P, P) → (N, width)."""
            return super().forward(patches.flatten(1))

    convolution = shell.patch_embed.proj
    weight, bias = convolution.weight, convolution.bias
    with torch.device("meta"):
        layer = PatchLinear(weight[0].numel(), weight.shape[0], bias=bias is not None)
    layer.weight = torch.nn.Parameter(weight.flatten(1), requires_grad=False)
    layer.bias = bias
    shell.patch_embed.proj = layer


def merged_width(c: Mapping[str, Any], wide: int) -> int:
    """wide·M²: the patches of one token side by side."""
    return wide * int(c["spatial_merge_size"]) ** 2


def patch_shape(c: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """(channels, T, P, P) of one patch."""
    return c["in_channels"], c["temporal_patch_size"], c["patch_size"], c["patch_size"]


def linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a linear layer with bias."""
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer norm."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
