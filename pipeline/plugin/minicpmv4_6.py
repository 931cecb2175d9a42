"""MiniCPM-V 4.6 takes several pages of different size in one chat request, none of them wrong.

vLLM takes its embeddings as it is, but the chat's parts are joined by the fields that its processor
declares, and `image_sizes` is not among them: the rows of two pages then become one. And nothing
compares the rows of a page with the placeholders that its size gives, on which the engine dies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.plugin.guard import MARKER
from pipeline.plugin.replace import replace, takes_embeddings
from pipeline.plugin.sources import MODELS, changed

if TYPE_CHECKING:
    import torch

MODULES = (f"{MODELS}.minicpmv4_6",)
MODEL_TYPES = ("minicpmv4_6",)

_EXPECTED = {
    "MiniCPMV4_6MultiModalProcessor._get_mm_fields_config": """
return _minicpmv4_6_field_config(hf_inputs)
""",
    "MiniCPMV4_6ProcessingInfo.get_num_image_tokens": """
grids, source_tokens, patch_tokens = self._compute_visual_tokens(
    image_size,
    max_slice_nums,
    downsample_mode=downsample_mode,
)
return source_tokens + grids[0] * grids[1] * patch_tokens
""",
    "MiniCPMV4_6ForConditionalGeneration._process_vision_input": """
if image_input["type"] == "image_embeds":
    return image_input["image_embeds"]
num_slices = image_input["num_slices"].tolist()
flags = _expand_flags(use_vit_merger, len(num_slices))
encoded: dict[int, torch.Tensor] = {}
for flag in dict.fromkeys(flags):
    item_indices = [i for i, f in enumerate(flags) if f == flag]
    group_input = _select_vision_items(image_input, item_indices, num_slices)
    group_features = self.get_vision_hidden_states(
        group_input,
        downsample_mode=_vision_downsample_mode(flag),
    )
    idx = 0
    for i in item_indices:
        n = num_slices[i]
        encoded[i] = torch.cat(group_features[idx : idx + n], dim=0)
        idx += n
return [encoded[i] for i in range(len(num_slices))]
""",
}


def source_misfit(name: str, text: str) -> str:
    """Why the processor can't be patched; empty where it can."""
    return changed(text, _EXPECTED)


def patch(module: Any) -> None:
    """Patch vLLM's minicpmv4_6, whose source was accepted."""
    processor = module.MiniCPMV4_6MultiModalProcessor
    replace(processor, "_get_mm_fields_config", _fields_with_sizes)
    replace(processor, "_get_prompt_updates", _placeholders_of_checked_rows)


def _fields_with_sizes(fields_without: Any) -> Any:
    def _get_mm_fields_config(self: Any, hf_inputs: Any, *more: Any, **named: Any) -> Any:
        fields = fields_without(self, hf_inputs, *more, **named)
        if "image_sizes" not in hf_inputs or not takes_embeddings(self.info, MODEL_TYPES):
            return fields
        from vllm.multimodal.inputs import MultiModalFieldConfig

        sizes = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
        return fields | {"image_sizes": sizes}

    return _get_mm_fields_config


def _placeholders_of_checked_rows(placeholders: Any) -> Any:
    def _get_prompt_updates(
        self: Any, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any
    ) -> Any:
        from vllm.multimodal.parse import DictEmbeddingItems

        images = mm_items.get("image")
        if isinstance(images, DictEmbeddingItems) and takes_embeddings(self.info, MODEL_TYPES):
            for number in range(images.get_count()):
                _check_rows(self, images, number, hf_processor_mm_kwargs)
        return placeholders(self, mm_items, hf_processor_mm_kwargs, out_mm_kwargs)

    return _get_prompt_updates


def _check_rows(processor: Any, images: Any, number: int, hf_kwargs: Any) -> None:
    """Raise vLLM's own validation error unless a page's rows fit its size."""
    expected = processor.info.get_num_image_tokens(
        images.get_image_size(number),
        processor._resolve_max_slice_nums(hf_kwargs),
        processor._resolve_downsample_mode(hf_kwargs),
    )
    width = processor.info._get_expected_hidden_size()
    reason = rows_misfit(images.get(number)["image_embeds"], expected, width)
    if reason:
        from vllm.exceptions import VLLMValidationError

        raise VLLMValidationError(f"{MARKER} {reason}")


def rows_misfit(rows: torch.Tensor, expected: int, width: int) -> str:
    """Why a page's rows are not the (expected, width) that its size gives; empty where they are."""
    if tuple(rows.shape) != (expected, width):
        asked = f"image_sizes asks for ({expected}, {width})"
        return f"image_embeds has shape {tuple(rows.shape)}, {asked}"
    if not rows.is_floating_point():
        return f"image_embeds is {rows.dtype} instead of floating point"
    if not rows.isfinite().all():
        return "image_embeds has values that are not finite"
    return ""
