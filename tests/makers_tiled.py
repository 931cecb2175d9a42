"""Tiny checkpoints of the families that cut a page into tiles, named as their hub files are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from checkpoints import READER, save_weights, write_json

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 8192,
    "eos_token_id": 256,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
CLIP = VISION | {"model_type": "clip_vision_model", "projection_dim": 32}
SIGLIP = VISION | {"model_type": "siglip_vision_model"}

_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
                {{- 'PLACEHOLDER' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def make_internvl(
    directory: Path,
    *,
    seed: int = 0,
    shards: int = 1,
    prefix: str = "",
    vision: dict[str, Any] | None = None,
    processor: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """InternVL in transformers' format; `prefix` is "" (hub) or "model." (from 4.52 on)."""
    special = ["<IMG_CONTEXT>", "<img>", "</img>", "<video>"]
    names = ["context_image_token", "start_image_token", "end_image_token", "video_token"]
    _write_tokenizer(directory, dict(zip(names, special, strict=True)), "<IMG_CONTEXT>\\n")
    config = {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "image_token_id": 264,
        "image_seq_length": 4,
        "downsample_ratio": 0.5,
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "internvl_vision", **VISION, **(vision or {})},
        "text_config": {"model_type": "qwen2", **TEXT},
    }
    image = {
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "crop_to_patches": False,  # as on the hub; the processor switches it on
        "min_patches": 1,
        "max_patches": 6,
        "size": {"height": 56, "width": 56},
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    write_json(directory / "preprocessor_config.json", image | (processor or {}))
    video = {"video_processor_type": "InternVLVideoProcessor", "size": image["size"]}
    write_json(directory / "video_preprocessor_config.json", video)
    _write_processor(directory, "InternVLProcessor", image_seq_length=4)
    return _write_model(directory, config, seed, shards, dtype, _old_names(prefix, clip=False))


def make_llava(
    directory: Path,
    *,
    seed: int = 0,
    shards: int = 1,
    prefix: str = "",
    vision: dict[str, Any] = CLIP,
    processor: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Path:
    """LLaVA 1.5 with a CLIP tower, or a SigLIP one (`vision=SIGLIP`)."""
    clip = vision["model_type"] == CLIP["model_type"]
    strategy = "default" if clip else "full"
    _write_tokenizer(directory, {"image_token": "<image>"}, "<image>\\n")
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": 264,
        "image_seq_length": 16,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": strategy,
        "vision_config": dict(vision),
        "text_config": {"model_type": "llama", **TEXT},
        **settings,
    }
    image = _clip_processor() if clip else _siglip_processor()
    write_json(directory / "preprocessor_config.json", image | (processor or {}))
    _write_processor(
        directory,
        "LlavaProcessor",
        patch_size=14,
        num_additional_image_tokens=int(clip),
        vision_feature_select_strategy=config["vision_feature_select_strategy"],
    )
    return _write_model(directory, config, seed, shards, dtype, _old_names(prefix, clip=True))


def make_llava_next(
    directory: Path,
    *,
    seed: int = 0,
    shards: int = 1,
    prefix: str = "",
    vision: dict[str, Any] = CLIP,
    processor: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Path:
    """LLaVA-NeXT (1.6): tiles of any of five resolutions, unpadded, with `image_newline`."""
    clip = vision["model_type"] == CLIP["model_type"]
    pinpoints = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
    _write_tokenizer(directory, {"image_token": "<image>"}, "<image>\\n")
    config = {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "model_type": "llava_next",
        "image_token_index": 264,
        "image_seq_length": 16,
        "image_grid_pinpoints": pinpoints,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default" if clip else "full",
        "vision_config": dict(vision),
        "text_config": {"model_type": "llama", **TEXT},
        **settings,
    }
    image = _clip_processor() | {
        "image_processor_type": "LlavaNextImageProcessor",
        "aspect_ratio_setting": "anyres",
        "image_grid_pinpoints": pinpoints,
        "do_pad": True,
    }
    write_json(directory / "preprocessor_config.json", image | (processor or {}))
    _write_processor(
        directory,
        "LlavaNextProcessor",
        patch_size=14,
        num_additional_image_tokens=int(clip),
        vision_feature_select_strategy=config["vision_feature_select_strategy"],
    )
    return _write_model(directory, config, seed, shards, dtype, _old_names(prefix, clip=True))


def make_minicpmv4_6(
    directory: Path,
    *,
    seed: int = 0,
    shards: int = 1,
    processor: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **settings: Any,
) -> Path:
    """MiniCPM-V 4.6: SigLIP with a window merger inside, on a Qwen3.5 hybrid."""
    tokens = {
        "image_start_token": "<image>",
        "image_end_token": "</image>",
        "slice_start_token": "<slice>",
        "slice_end_token": "</slice>",
        "image_id_start_token": "<image_id>",
        "image_id_end_token": "</image_id>",
    }
    known = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    _write_tokenizer(directory, known | tokens, "<|image_pad|>\\n")
    hybrid = {
        "model_type": "qwen3_5_text",
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,  # vLLM's CPU kernel has no other
        "linear_value_head_dim": 128,
        "layer_types": ["linear_attention", "full_attention"],
    }
    config = {
        "architectures": ["MiniCPMV4_6ForConditionalGeneration"],
        "model_type": "minicpmv4_6",
        "image_token_id": 262,
        "video_token_id": 263,
        "insert_layer_id": 0,
        "image_size": 112,
        "tie_word_embeddings": False,
        "vision_config": {**VISION, "image_size": 112},
        "text_config": TEXT | hybrid,
        **settings,
    }
    image = {
        "image_processor_type": "MiniCPMV4_6ImageProcessor",
        "scale_resolution": 112,
        "max_slice_nums": 9,
        "patch_size": 14,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    write_json(directory / "preprocessor_config.json", image | (processor or {}))
    video = image | {"video_processor_type": "MiniCPMV4_6VideoProcessor"}
    del video["image_processor_type"]
    write_json(directory / "video_preprocessor_config.json", video)
    _write_processor(directory, "MiniCPMV4_6Processor")
    return _write_model(directory, config, seed, shards, dtype, {})


def _clip_processor() -> dict[str, Any]:
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_center_crop": True,
        "crop_size": {"height": 56, "width": 56},
        "size": {"shortest_edge": 56},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }


def _siglip_processor() -> dict[str, Any]:
    return {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": 56, "width": 56},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def _old_names(prefix: str, *, clip: bool) -> dict[str, str]:
    """Prefixes of transformers 5 → those of hub files, which vLLM's own tower loads."""
    return {
        "model.vision_tower.": f"{prefix}vision_tower." + ("vision_model." if clip else ""),
        "model.multi_modal_projector.": f"{prefix}multi_modal_projector.",
        "model.image_newline": f"{prefix}image_newline",
        "model.language_model.": "model.language_model." if prefix else "language_model.model.",
        "lm_head.": "lm_head." if prefix else "language_model.lm_head.",
    }


def _write_tokenizer(directory: Path, tokens: dict[str, str], placeholder: str) -> None:
    """The bundled reader's tokenizer of bytes with the family's special tokens from 264 on."""
    directory.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(READER / name, directory / name)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    known = {token["content"] for token in tokenizer["added_tokens"]}
    for text in tokens.values():
        if text not in known:
            last = tokenizer["added_tokens"][-1]
            tokenizer["added_tokens"].append(last | {"id": last["id"] + 1, "content": text})
    write_json(directory / "tokenizer.json", tokenizer)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    write_json(directory / "tokenizer_config.json", settings | {"extra_special_tokens": tokens})
    template = _TEMPLATE.replace("PLACEHOLDER", placeholder)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_processor(directory: Path, kind: str, **settings: Any) -> None:
    write_json(directory / "processor_config.json", {"processor_class": kind, **settings})


def _write_model(
    directory: Path,
    config: dict[str, Any],
    seed: int,
    shards: int,
    dtype: torch.dtype,
    names: dict[str, str],
) -> Path:
    write_json(directory / "config.json", config | {"dtype": str(dtype).removeprefix("torch.")})
    weights = {
        _renamed(name, names): tensor.to(dtype) for name, tensor in _random_weights(directory, seed)
    }
    save_weights(directory, weights, shards)
    return directory


def _renamed(name: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _random_weights(directory: Path, seed: int) -> Iterable[tuple[str, torch.Tensor]]:
    """Weights of unit gain, so that an embedding depends on every layer, an answer on every row."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(directory))
    model.float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                parameter.normal_(0.0, 1.0)  # as loud as rows, so that answers do not repeat
            elif parameter.ndim > 1 and parameter.shape[0] > 1:
                parameter.normal_(0.0, parameter[0].numel() ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    for name, tensor in model.state_dict().items():
        yield name, tensor.contiguous()
