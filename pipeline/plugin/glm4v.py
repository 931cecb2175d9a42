"""GLM-4V and GLM-OCR take embeddings: vLLM's model classes can, only their parser can't.

Their fields and their model code are Qwen2-VL's already, so Qwen2-VL's parser fits as it is.
"""

from __future__ import annotations

from typing import Any

from pipeline.plugin.replace import replace, takes_embeddings
from pipeline.plugin.sources import MODELS, changed

MODULES = (f"{MODELS}.glm4_1v",)
MODEL_TYPES = ("glm4v", "glm_ocr")

_EXPECTED = {
    "Glm4vProcessingInfo.get_data_parser": """
return MultiModalDataParser(
    video_needs_metadata=True,
    expected_hidden_size=self._get_expected_hidden_size(),
)
""",
    "Glm4vMultiModalProcessor._get_mm_fields_config": """
return _create_qwen2vl_field_factory(
    self.info.get_hf_config().vision_config.spatial_merge_size
)(hf_inputs)
""",
    "Glm4vForConditionalGeneration._process_image_input": """
grid_thw = image_input["image_grid_thw"]
assert grid_thw.ndim == 2
if image_input["type"] == "image_embeds":
    image_embeds = image_input["image_embeds"].type(self.visual.dtype)
else:
    pixel_values = image_input["pixel_values"]
    if self.use_data_parallel:
        return run_dp_sharded_mrope_vision_model(
            self.visual, pixel_values, grid_thw.tolist(), rope_type="rope_3d"
        )
    else:
        image_embeds = self.visual(pixel_values, grid_thw=grid_thw)
merge_size = self.visual.spatial_merge_size
sizes = (grid_thw.prod(-1) // merge_size // merge_size).tolist()
return image_embeds.split(sizes)
""",
}


def source_misfit(name: str, text: str) -> str:
    """Why the parser can't be replaced; empty where it can."""
    return changed(text, _EXPECTED)


def patch(module: Any) -> None:
    """Patch vLLM's glm4_1v, whose source was accepted; glm_ocr takes its parser from there."""
    replace(module.Glm4vProcessingInfo, "get_data_parser", _parser_of_embeddings)


def _parser_of_embeddings(make_parser: Any) -> Any:
    def get_data_parser(self: Any) -> Any:
        if not takes_embeddings(self, MODEL_TYPES):
            return make_parser(self)
        from vllm.model_executor.models.qwen2_vl import Qwen2VLMultiModalDataParser

        return Qwen2VLMultiModalDataParser(
            self.get_hf_config().vision_config.spatial_merge_size,
            video_needs_metadata=True,
            expected_hidden_size=self._get_expected_hidden_size(),
            allow_missing_mm_embeddings=self.allow_missing_mm_embeddings,
        )

    return get_data_parser
