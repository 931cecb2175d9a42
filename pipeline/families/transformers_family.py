"""A family whose tower runs through transformers' own model class.

A family's file names the class, its vision parts and the checkpoint's prefixes, and overrides
what is its own. Dimension key: H, W page in px · R rows (tokens) · O width of the language
model's input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint import Model, checked_settings, vision_tensors
from pipeline.errors import CheckpointError
from pipeline.families.delivery import Delivery
from pipeline.families.processors import normalisation_warnings
from pipeline.families.shell import build_shell, fill_shell
from pipeline.geometry import Placement
from pipeline.keys import EncodeSpec

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

_NO_SETTING = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")


@dataclass(frozen=True)
class TransformersFamily:
    """See `Family` for what each method promises.

    `shell` is the class in transformers; a checkpoint tensor that starts with the first of a
    pair in `prefixes` is the tower's tensor that starts with the second; tower names are those
    of the shell without `shell_prefix`, and the tower is all of the shell below `parts`.
    """

    name: str
    shell: str
    prefixes: tuple[tuple[str, str], ...]
    parts: tuple[str, ...]
    delivery: Delivery
    shell_prefix: str = "model."
    modalities: tuple[str, ...] = ("image",)
    patches: tuple[str, ...] = ()
    cpu_dtype: str | None = None

    # ---------------------------------------------------------------- weights

    def weight_name(self, name: str) -> str | None:
        """See `WeightLayout`; the first prefix that fits decides."""
        for stored, ours in self.prefixes:
            if name.startswith(stored):
                return ours + name.removeprefix(stored)
        return None

    def vision_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The tower's settings as the checkpoint has them; what it leaves out is left out."""
        vision = config.get("vision_config")
        if not isinstance(vision, Mapping):
            raise CheckpointError("vision_config is no JSON object")
        return {name: value for name, value in vision.items() if name not in _NO_SETTING}

    def expected_shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
        """None: the names and shapes are compared with the module's when it is loaded."""
        return None

    # ---------------------------------------------------------------- sizes

    def text_hidden_size(self, config: Mapping[str, Any]) -> int:
        """O."""
        text = checked_settings(config.get("text_config"), {"hidden_size": 4096}, "text_config")
        return int(text["hidden_size"])

    def row_width(self, config: Mapping[str, Any]) -> int:
        """O: nothing but the merged patch."""
        return self.text_hidden_size(config)

    def encode_spec(
        self,
        model: Model,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        precision: str = "float32",
    ) -> EncodeSpec:
        """A family's own."""
        raise NotImplementedError

    def placeholder(
        self, model: Model, spec: EncodeSpec, height_px: int, width_px: int
    ) -> tuple[str | int, ...]:
        """A PROMPT family's own; no other is asked."""
        raise NotImplementedError

    # ---------------------------------------------------------------- engine

    def config_overrides(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """None are needed."""
        return {}

    def native_settings(self, spec: EncodeSpec) -> dict[str, Any]:
        """None: the processor decides by itself."""
        return {}

    def warnings(self, model: Model) -> tuple[str, ...]:
        """Traps that a checkpoint of any family may hold."""
        return normalisation_warnings(model)

    # ---------------------------------------------------------------- pixels and tower

    def resize(
        self, rgb: NDArray[np.uint8], placement: Placement, spec: EncodeSpec
    ) -> NDArray[np.uint8]:
        """The page as it is: the processor that cuts it also resizes it."""
        return rgb

    def load_tower(self, model: Model, precision: str = "float32") -> ProcessorTower:
        """The shell with the checkpoint's vision weights, and the checkpoint's processor."""
        import torch

        shell = build_shell(model, lambda: self.make_shell(model))
        weights = vision_tensors(model, self, getattr(torch, precision))
        fill_shell(model, shell, weights, self.parts, self.shell_prefix)
        return ProcessorTower(self, shell, self.make_processor(model))

    def make_processor(self, model: Model) -> Any:
        """The checkpoint's image processor, with what its joint processor would tell it."""
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(model.path)

    def make_shell(self, model: Model) -> Any:
        """Construct the class with a language model of one layer."""
        import transformers

        shell_class = getattr(transformers, self.shell)
        config = shell_class.config_class.from_dict(dict(model.config))
        config._attn_implementation = "sdpa"  # eager attention would hold all scores of a head
        text = config.get_text_config()
        text.num_hidden_layers = 1
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:1]
        return shell_class(config)

    def features(self, shell: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """(R, O) of one page, given the processor's tensors."""
        raise NotImplementedError


class ProcessorTower:
    """A shell with the checkpoint's image processor, which resizes, cuts and normalises."""

    def __init__(self, family: TransformersFamily, shell: Any, processor: Any) -> None:
        self._family, self._shell, self._processor = family, shell, processor

    def encode(self, pixels: NDArray[np.uint8]) -> torch.Tensor:
        """(H, W, 3) uint8 → (R, width) in the tower's precision."""
        import numpy as np
        import torch

        # a decoder's array may be read-only, which torch warns of
        inputs = self._processor(
            images=[np.array(pixels)], input_data_format="channels_last", return_tensors="pt"
        )
        with torch.inference_mode():
            return self._family.features(self._shell, inputs)

    def encode_original(self, rgb: NDArray[np.uint8], spec: EncodeSpec) -> torch.Tensor:
        """The same: the processor is given the page as it is anyway."""
        return self.encode(rgb)
