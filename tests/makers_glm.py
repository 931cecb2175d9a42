"""Tiny checkpoints of GLM-4V, GLM-OCR and PaddleOCR-VL, named and laid out as on the hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from checkpoints import READER, save_weights, write_json

HIDDEN = 64
_VOCABULARY = 320  # 256 bytes, the marks below, and room
_TOKENS = {"eos_token_id": 256, "bos_token_id": 257, "pad_token_id": 257}
_GLM_MARKS = (
    *("<|begin_of_image|>", "<|end_of_image|>", "<|image|>"),
    *("<|begin_of_video|>", "<|end_of_video|>", "<|video|>"),
)
_PADDLE_MARKS = ("<|IMAGE_START|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>")
_FIRST_MARK = 264
_HALF = [0.5, 0.5, 0.5]

_GLM_TEXT: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    **_TOKENS,
}
_GLM_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "image_size": 112,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": HIDDEN,
    "rms_norm_eps": 1e-5,
}
_GLM_PROCESSOR: dict[str, Any] = {
    # the temporal patches count: one of 28 × 28 px is 1,568 here
    "size": {"shortest_edge": 12_544, "longest_edge": 300_000},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "do_rescale": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def make_glm4v(directory: Path, *, seed: int = 0, shards: int = 2) -> Path:
    """A random GLM-4V: GLM-4.1V, GLM-4.6V-Flash."""
    text = _GLM_TEXT | {"model_type": "glm4v_text", "intermediate_size": 128}
    text["rope_parameters"] = _rope([2, 3, 3], partial_rotary_factor=0.5)
    config = {
        "architectures": ["Glm4vForConditionalGeneration"],
        "model_type": "glm4v",
        "vision_config": _GLM_VISION | {"model_type": "glm4v_vision", "intermediate_size": 96},
        "text_config": text,
        **_glm_marks(),
    }
    _write_glm(directory, config, "Glm4vImageProcessor", "Glm4vProcessor")
    save_weights(directory, _random_weights(directory, seed), shards)
    return directory


def make_glm_ocr(directory: Path, *, seed: int = 0, shards: int = 1) -> Path:
    """A random GLM-OCR; its merger is three times as wide as the text, as vLLM wants it."""
    text = _GLM_TEXT | {"model_type": "glm_ocr_text", "intermediate_size": 3 * HIDDEN}
    text["rope_parameters"] = _rope([4, 6, 6], partial_rotary_factor=1.0)
    config = {
        "architectures": ["GlmOcrForConditionalGeneration"],
        "model_type": "glm_ocr",
        "vision_config": _GLM_VISION | {"model_type": "glm_ocr_vision", "intermediate_size": 48},
        "text_config": text,
        **_glm_marks(),
    }
    _write_glm(directory, config, "Glm46VImageProcessor", "Glm46VProcessor")
    save_weights(directory, _random_weights(directory, seed), shards)
    return directory


def make_paddleocr_vl(directory: Path, *, seed: int = 2, shards: int = 1) -> Path:
    """A random PaddleOCR-VL: a flat config, the connector beside the tower, a head unused.

    Of a seed whose answers change from token to token; most tied nets of this size repeat one.
    """
    config = {
        "architectures": ["PaddleOCRVLForConditionalGeneration"],
        "model_type": "paddleocr_vl",
        "vocab_size": _VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000,
        "rope_scaling": {"mrope_section": [4, 6, 6], "rope_type": "default", "type": "default"},
        "rope_is_neox_style": True,
        "tie_word_embeddings": True,
        "use_bias": False,
        "vision_config": {
            "model_type": "paddleocr_vl",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 112,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "image_token_id": _FIRST_MARK + 2,
        "video_token_id": _VOCABULARY - 1,
        "vision_start_token_id": _FIRST_MARK,
        "vision_end_token_id": _FIRST_MARK + 1,
        **_TOKENS,
    }
    processor = {
        "image_processor_type": "PaddleOCRVLImageProcessor",
        "processor_class": "PaddleOCRVLProcessor",
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": _HALF,
        "image_std": _HALF,
        "min_pixels": 9_408,
        "max_pixels": 200_000,
        "size": {"min_pixels": 9_408, "max_pixels": 200_000},
        "patch_size": 14,
        "temporal_patch_size": 1,
        "merge_size": 2,
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
    }
    directory.mkdir(parents=True)
    write_json(directory / "config.json", config)
    write_json(directory / "preprocessor_config.json", processor)
    _write_tokenizer(directory, _PADDLE_MARKS, image_token="<|IMAGE_PLACEHOLDER|>")
    weights = {
        _paddle_name(name): tensor
        for name, tensor in _random_weights(directory, seed).items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    weights["model.embed_tokens.weight"] *= 0.3  # else the last token calls for itself again
    weights["visual.vision_model.head.probe"] = torch.randn(1, 1, 32)
    save_weights(directory, weights, shards)
    return directory


def _rope(section: list[int], **more: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": section, **more}


def _glm_marks() -> dict[str, Any]:
    names = ("image_start", "image_end", "image", "video_start", "video_end", "video")
    marks = {f"{name}_token_id": _FIRST_MARK + place for place, name in enumerate(names)}
    return marks | {"tie_word_embeddings": False}


def _write_glm(directory: Path, config: dict[str, Any], image: str, whole: str) -> None:
    directory.mkdir(parents=True)
    write_json(directory / "config.json", config)
    kinds = {"processor_class": whole}
    write_json(
        directory / "preprocessor_config.json",
        _GLM_PROCESSOR | kinds | {"image_processor_type": image},
    )
    write_json(
        directory / "video_preprocessor_config.json",
        _GLM_PROCESSOR
        | kinds
        | {"video_processor_type": image.replace("Image", "Video"), "fps": 1, "num_frames": 16},
    )
    _write_tokenizer(directory, _GLM_MARKS)


def _write_tokenizer(directory: Path, marks: tuple[str, ...], **more: str) -> None:
    """One token per byte, then the family's marks; the template puts them around an image."""
    tokenizer = json.loads((READER / "tokenizer.json").read_text())
    for place, mark in enumerate(marks):
        token = tokenizer["added_tokens"][0] | {"id": _FIRST_MARK + place, "content": mark}
        tokenizer["added_tokens"].append(token)
    write_json(directory / "tokenizer.json", tokenizer)
    settings = json.loads((READER / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(directory / "tokenizer_config.json", settings | more)
    shutil.copy(READER / "generation_config.json", directory)
    template = (READER / "chat_template.jinja").read_text()
    start, end, image = marks[:3]
    template = template.replace(
        "<|vision_start|><|image_pad|><|vision_end|>", f"{start}{image}{end}"
    )
    (directory / "chat_template.jinja").write_text(template)


def _paddle_name(name: str) -> str:
    """As on the hub: transformers renames while it loads."""
    for ours, theirs in (
        ("model.visual.", "visual."),
        ("model.projector.", "mlp_AR."),
        ("model.language_model.", "model."),
    ):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def _random_weights(directory: Path, seed: int) -> dict[str, torch.Tensor]:
    """float32 (engines are compared in it), of unit gain: an answer depends on every layer."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(directory)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                fan_in = parameter[0].numel() if parameter.ndim > 2 else parameter.shape[-1]
                parameter.normal_(0.0, fan_in**-0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
