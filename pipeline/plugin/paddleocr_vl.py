"""PaddleOCR-VL takes embeddings: vLLM's model class knows pixels only.

Four places, each of which goes on as before where a request has pixels: the parser, the fields
that are sent to the worker, the number of placeholders, and what the worker makes of them.
"""

from __future__ import annotations

from typing import Any

from pipeline.plugin.replace import replace, takes_embeddings
from pipeline.plugin.sources import MODELS, changed

MODULES = (f"{MODELS}.paddleocr_vl",)
MODEL_TYPES = ("paddleocr_vl",)

_EXPECTED = {
    "PaddleOCRVLProcessingInfo.get_data_parser": "",
    "PaddleOCRVLMultiModalProcessor._get_mm_fields_config": """
return dict(
    pixel_values=MultiModalFieldConfig.batched("image"),
    image_grid_thw=MultiModalFieldConfig.batched("image", keep_on_cpu=True),
)
""",
    "PaddleOCRVLMultiModalProcessor._get_prompt_updates": """
image_processor = self.info.get_image_processor(**hf_processor_mm_kwargs)
hf_config = self.info.get_hf_config()
image_token_id = hf_config.image_token_id

def get_replacement(item_idx: int, image_processor):
    images = mm_items.get_items("image", ImageProcessorItems)
    image_size = images.get_image_size(item_idx)
    num_image_tokens = self.info.get_num_image_tokens(
        image_width=image_size.width,
        image_height=image_size.height,
        image_processor=image_processor,
        mm_kwargs=hf_processor_mm_kwargs,
    )
    return [image_token_id] * num_image_tokens

return [
    PromptReplacement(
        modality="image",
        target=[image_token_id],
        replacement=partial(get_replacement, image_processor=image_processor),
    ),
]
""",
    "PaddleOCRVLForConditionalGeneration.embed_multimodal": """
image_input = self._parse_and_validate_image_input(**kwargs)
if image_input is None:
    return ()
multimodal_embeddings: tuple[torch.Tensor, ...] = ()
image_embeds = self._process_image_input(image_input)
multimodal_embeddings += tuple(image_embeds)
return multimodal_embeddings
""",
}


def source_misfit(name: str, text: str) -> str:
    """Why the model can't be patched; empty where it can."""
    return changed(text, _EXPECTED)


def patch(module: Any) -> None:
    """Patch vLLM's paddleocr_vl, whose source was accepted."""
    processor = module.PaddleOCRVLMultiModalProcessor
    replace(module.PaddleOCRVLProcessingInfo, "get_data_parser", _parser_of_embeddings)
    replace(processor, "_get_mm_fields_config", _fields_of_embeddings)
    replace(processor, "_get_prompt_updates", _placeholders_of_embeddings)
    model = module.PaddleOCRVLForConditionalGeneration
    replace(model, "embed_multimodal", _rows_of_embeddings)


def _parser_of_embeddings(make_parser: Any) -> Any:
    def get_data_parser(self: Any) -> Any:
        if not takes_embeddings(self, MODEL_TYPES):
            return make_parser(self)
        from vllm.model_executor.models.qwen2_vl import Qwen2VLMultiModalDataParser

        return Qwen2VLMultiModalDataParser(
            self.get_hf_config().vision_config.spatial_merge_size,
            expected_hidden_size=self._get_expected_hidden_size(),
            allow_missing_mm_embeddings=self.allow_missing_mm_embeddings,
        )

    return get_data_parser


def _fields_of_embeddings(fields_of_pixels: Any) -> Any:
    def _get_mm_fields_config(self: Any, hf_inputs: Any, *more: Any, **named: Any) -> Any:
        fields = fields_of_pixels(self, hf_inputs, *more, **named)
        if "image_embeds" not in hf_inputs:
            return fields
        from vllm.multimodal.inputs import MultiModalFieldConfig

        merge = self.info.get_hf_config().vision_config.spatial_merge_size
        rows = hf_inputs["image_grid_thw"].prod(-1) // merge**2  # (images,)
        return fields | {"image_embeds": MultiModalFieldConfig.flat_from_sizes("image", rows)}

    return _get_mm_fields_config


def _placeholders_of_embeddings(placeholders_of_pixels: Any) -> Any:
    def _get_prompt_updates(self: Any, mm_items: Any, *more: Any, **named: Any) -> Any:
        from vllm.multimodal.parse import DictEmbeddingItems
        from vllm.multimodal.processing import PromptReplacement

        images = mm_items.get("image")
        if not isinstance(images, DictEmbeddingItems):
            return placeholders_of_pixels(self, mm_items, *more, **named)
        config = self.info.get_hf_config()
        token, merge = config.image_token_id, config.vision_config.spatial_merge_size

        def tokens_of(number: int) -> list[int]:
            grid = images.get(number)["image_grid_thw"]  # (3,)
            return [token] * (int(grid.prod()) // merge**2)

        return [PromptReplacement(modality="image", target=[token], replacement=tokens_of)]

    return _get_prompt_updates


def _rows_of_embeddings(rows_of_pixels: Any) -> Any:
    def embed_multimodal(self: Any, **kwargs: Any) -> Any:
        rows = kwargs.get("image_embeds")  # (Σ rows, width)
        if rows is None:
            return rows_of_pixels(self, **kwargs)
        merge = self.config.vision_config.spatial_merge_size
        sizes = (kwargs["image_grid_thw"].prod(-1) // merge**2).tolist()
        return rows.type(self.visual.dtype).split(sizes)

    return embed_multimodal
