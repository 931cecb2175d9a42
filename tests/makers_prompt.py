"""Tiny checkpoints of the families that take embeddings only in the prompt.

Random weights in the names that the hub has; tokenizers of one token per byte (and one for an
empty line, as the real ones have), the special tokens and chat templates of the originals.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from checkpoints import READER, save_weights, write_json

Renames = tuple[tuple[str, str], ...]

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 8192,
}
PIXTRAL_VISION: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 32,
    "num_channels": 3,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
}
SIGLIP_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
CLIP_NORM: dict[str, Any] = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
HALF_NORM: dict[str, Any] = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
STEPS: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
}

MISTRAL_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '[INST]' }}
        {%- if message['content'] is string %}
            {{- message['content'] }}
        {%- else %}
            {%- for block in message['content'] %}
                {%- if block['type'] == 'text' %}
                    {{- block['text'] }}
                {%- elif block['type'] in ['image', 'image_url'] %}
                    {{- '[IMG]' }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- '[/INST]' }}
    {%- elif message['role'] == 'system' %}
        {%- if message['content'] is string %}
            {{- '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}
        {%- else %}
            {{- '[SYSTEM_PROMPT]' + message['content'][0]['text'] + '[/SYSTEM_PROMPT]' }}
        {%- endif %}
    {%- else %}
        {%- if message['content'] is string %}
            {{- message['content'] + eos_token }}
        {%- else %}
            {{- message['content'][0]['text'] + eos_token }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
"""
LIGHTON_TEMPLATE = """\
{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
<|im_start|>system<|im_end|>
{% endif %}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}
{{ message['content'] }}<|im_end|>
{% else %}
{% for content in message['content'] %}
{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}
<|image_pad|>
{%- elif 'text' in content %}
{{ content['text'] }}
{% endif %}
{% endfor %}
<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
IDEFICS_TEMPLATE = """\
<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}\
{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}\
{% for line in message['content'] %}\
{% if line['type'] == 'text' %}{{ line['text'] }}\
{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}\
{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
LFM_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['content'] is string -%}
        {{- message['content'] -}}
    {%- else -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{- '<image>' -}}
            {%- else -%}
                {{- item['text'] -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

MISTRAL_TOKENS = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
)
LIGHTON_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>"),
)
TILE_TOKENS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))
IDEFICS_TOKENS = (
    *("<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>"),
    *("<global-img>", *TILE_TOKENS),
)
LFM_TOKENS = (
    *("<|pad|>", "<|startoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
    *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
)


# ---------------------------------------------------------------- the six families


def make_mistral3(directory: Path, *, seed: int = 0, shards: int = 1, old: bool = True) -> Path:
    """Mistral-Small-3.1: 28 px per token, rows broken by tokens; `old` names, as on the hub."""
    tokens = _write_tokenizer(directory, MISTRAL_TOKENS, "<s>", "</s>")
    text = TEXT | {"model_type": "mistral", "rms_norm_eps": 1e-5, "sliding_window": None}
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "image_token_index": tokens["[IMG]"],
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": False,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
        "text_config": text | {"tie_word_embeddings": False},
        "vision_config": PIXTRAL_VISION | {"patch_size": 14, "image_size": 336},
    }
    _write_pixtral_processor(directory, patch_size=14, merge_size=2, longest_edge=336)
    (directory / "chat_template.jinja").write_text(MISTRAL_TEMPLATE)
    return _finish(directory, config, seed, shards, MISTRAL_OLD if old else ())


def make_lightonocr(directory: Path, *, seed: int = 0, shards: int = 1) -> Path:
    """LightOnOCR: Mistral 3's tower under other names, Qwen3 text, rows without breaks."""
    tokens = _write_tokenizer(directory, LIGHTON_TOKENS, None, "<|im_end|>")
    text = TEXT | {"model_type": "qwen3", "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
    config = {
        "architectures": ["LightOnOCRForConditionalGeneration"],
        "model_type": "mistral3",
        "image_token_id": tokens["<|image_pad|>"],
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": False,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "text_config": text,
        "vision_config": PIXTRAL_VISION | {"patch_size": 14, "image_size": 336},
    }
    _write_pixtral_processor(
        directory,
        patch_size=14,
        merge_size=2,
        longest_edge=336,
        do_pad=None,
        image_token="<|image_pad|>",
        image_break_token="<|vision_pad|>",
        image_end_token="<|vision_end|>",
    )
    (directory / "chat_template.jinja").write_text(LIGHTON_TEMPLATE)
    return _finish(directory, config, seed, shards, LIGHTON_NAMES)


def make_pixtral_hf(directory: Path, *, seed: int = 0, shards: int = 1, old: bool = True) -> Path:
    """Pixtral-12B in transformers' format: a Llava with a Pixtral tower, 16 px per token."""
    tokens = _write_tokenizer(directory, MISTRAL_TOKENS, "<s>", "</s>")
    text = TEXT | {"model_type": "mistral", "rms_norm_eps": 1e-5, "sliding_window": None}
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": tokens["[IMG]"],
        "image_seq_length": 1,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": False,
        "text_config": text | {"tie_word_embeddings": False},
        "vision_config": PIXTRAL_VISION | {"patch_size": 16, "image_size": 192},
    }
    _write_pixtral_processor(directory, patch_size=16, merge_size=1, longest_edge=192)
    (directory / "chat_template.jinja").write_text(MISTRAL_TEMPLATE)
    return _finish(directory, config, seed, shards, MISTRAL_OLD if old else ())


def make_idefics3(directory: Path, *, seed: int = 0, shards: int = 1) -> Path:
    """Idefics3: square tiles of 56 px (4 tokens each), then the whole page once more."""
    return _make_tiled(directory, "idefics3", "Idefics3", "llama", seed, shards)


def make_smolvlm(directory: Path, *, seed: int = 0, shards: int = 1) -> Path:
    """SmolVLM 2: Idefics3's design under another name."""
    return _make_tiled(directory, "smolvlm", "SmolVLM", "llama", seed, shards)


def _make_tiled(
    directory: Path, kind: str, class_stem: str, text_type: str, seed: int, shards: int
) -> Path:
    tokens = _write_tokenizer(directory, IDEFICS_TOKENS, "<|im_start|>", "<end_of_utterance>")
    vision = SIGLIP_VISION | {"image_size": 56, "patch_size": 14}
    text = TEXT | {"model_type": text_type, "rms_norm_eps": 1e-5, "pad_token_id": 0}
    config = {
        "architectures": [f"{class_stem}ForConditionalGeneration"],
        "model_type": kind,
        "image_token_id": tokens["<image>"],
        "scale_factor": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision,
    }
    processor = {
        "image_processor_type": f"{class_stem}ImageProcessor",
        "processor_class": f"{class_stem}Processor",
        "size": {"longest_edge": 168},
        "max_image_size": {"longest_edge": 56},
        "do_image_splitting": True,
        "do_pad": True,
        "resample": 1,
    }
    write_json(directory / "preprocessor_config.json", processor | STEPS | HALF_NORM)
    joined = {"processor_class": f"{class_stem}Processor", "image_seq_len": 4}
    write_json(directory / "processor_config.json", joined)
    (directory / "chat_template.jinja").write_text(IDEFICS_TEMPLATE)
    return _finish(directory, config, seed, shards, ())


def make_lfm2_vl(
    directory: Path,
    *,
    seed: int = 0,
    shards: int = 1,
    old: bool = True,
    head: bool = False,
    complete: bool = False,
    said: range | None = None,
) -> Path:
    """LFM2-VL: 32 px per token, larger pages cut into tiles of 64 px with a thumbnail.

    `old` names and no pooling `head`, as on the hub; `complete` with the settings that vLLM
    reads and transformers 5.19 no longer writes; `said` as in `_finish`.
    """
    tokens = _write_tokenizer(directory, LFM_TOKENS, "<|startoftext|>", "<|im_end|>")
    text = {name: value for name, value in TEXT.items() if name != "head_dim"} | {
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention"],
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": False,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 64,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    if complete:
        text |= {"conv_dim": 64, "block_dim": 64, "block_ff_dim": 128}
    vision = SIGLIP_VISION | {
        "model_type": "siglip2_vision_model",
        "patch_size": 16,
        "num_patches": 16,
        "num_channels": 3,
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh",
        "vision_use_head": head,
    }
    config = {
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "model_type": "lfm2_vl",
        "image_token_id": tokens["<image>"],
        "downsample_factor": 2,
        "projector_bias": True,
        "projector_hidden_act": "gelu",
        "projector_hidden_size": 96,
        "projector_use_layernorm": True,
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": vision,
    }
    processor = {
        "image_processor_type": "Lfm2VlImageProcessorFast",
        "processor_class": "Lfm2VlProcessor",
        "downsample_factor": 2,
        "do_image_splitting": True,
        "min_tiles": 2,
        "max_tiles": 6,
        "use_thumbnail": True,
        "min_image_tokens": 2,
        "max_image_tokens": 8,
        "encoder_patch_size": 16,
        "tile_size": 64,
        "max_pixels_tolerance": 2.0,
        "do_pad": True,
        "resample": 2,
    }
    write_json(directory / "preprocessor_config.json", processor | STEPS | HALF_NORM)
    write_json(directory / "processor_config.json", {"processor_class": "Lfm2VlProcessor"})
    (directory / "chat_template.jinja").write_text(LFM_TEMPLATE)
    return _finish(directory, config, seed, shards, LFM_OLD if old else (), said)


PROMPT_MAKERS: dict[str, Callable[..., Path]] = {
    "mistral3": make_mistral3,
    "lightonocr": make_lightonocr,
    "pixtral_hf": make_pixtral_hf,
    "idefics3": make_idefics3,
    "smolvlm": make_smolvlm,
    "lfm2_vl": make_lfm2_vl,
}

# ---------------------------------------------------------------- files

MISTRAL_OLD: Renames = (  # as on the hub, saved before transformers 4.52
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)
LFM_OLD: Renames = (("model.vision_tower.", "model.vision_tower.vision_model."),)
LIGHTON_NAMES: Renames = (
    ("model.vision_tower.", "model.vision_encoder."),
    ("model.multi_modal_projector.", "model.vision_projection."),
)


def _write_tokenizer(
    directory: Path, special: Iterable[str], bos: str | None, eos: str
) -> dict[str, int]:
    """A token per byte and one for an empty line; returns the ids of the special ones."""
    directory.mkdir(parents=True)
    tokenizer: dict[str, Any] = json.loads((READER / "tokenizer.json").read_text())
    model = tokenizer["model"]
    model["vocab"] |= {"ĊĊ": len(model["vocab"])}
    model["merges"] = [["Ċ", "Ċ"]]
    ids = {token: len(model["vocab"]) + place for place, token in enumerate(special)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] = [
        {"id": number, "content": token, **flags, "special": True} for token, number in ids.items()
    ]
    write_json(directory / "tokenizer.json", tokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": eos,
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
    }
    write_json(directory / "tokenizer_config.json", settings)
    assert max(ids.values()) < TEXT["vocab_size"], ids
    return ids


def _write_pixtral_processor(
    directory: Path, *, patch_size: int, merge_size: int, longest_edge: int, **changes: Any
) -> None:
    """Patches of the image processor are the tower's; only the joint one knows of merging."""
    image: dict[str, Any] = {
        "image_processor_type": "PixtralImageProcessorFast",
        "processor_class": "PixtralProcessor",
        "patch_size": patch_size,
        "size": {"longest_edge": longest_edge},
        "resample": 3,
        "do_pad": changes.pop("do_pad", True),
    }
    write_json(directory / "preprocessor_config.json", image | STEPS | CLIP_NORM)
    joint: dict[str, Any] = {
        "processor_class": "PixtralProcessor",
        "patch_size": patch_size,
        "spatial_merge_size": merge_size,
        "image_token": "[IMG]",
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
    }
    write_json(directory / "processor_config.json", joint | changes)


def _finish(
    directory: Path,
    config: dict[str, Any],
    seed: int,
    shards: int,
    renames: Renames,
    said: range | None = None,
) -> Path:
    """Write config.json and random weights under the names that `renames` gives them.

    Of a tied embedding only the rows in `said` are not zero: the fewer tokens an answer is made
    of, the further apart their probabilities.
    """
    config["dtype"] = "bfloat16"
    write_json(directory / "config.json", config)
    weights = {
        _renamed(name, renames): tensor.to(torch.bfloat16)
        for name, tensor in _random_weights(directory, config, seed).items()
    }
    if said is not None:
        (name,) = (name for name in weights if name.endswith("embed_tokens.weight"))
        kept = torch.zeros_like(weights[name])
        kept[said] = weights[name][said]
        weights[name] = kept
    save_weights(directory, weights, shards)
    return directory


def _random_weights(
    directory: Path, config: Mapping[str, Any], seed: int
) -> dict[str, torch.Tensor]:
    """Weights of unit gain, so that an answer depends on every layer; tied ones once."""
    import transformers

    known = transformers.AutoConfig.from_pretrained(directory)
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(known)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                fan_in = parameter[0].numel() if parameter.ndim > 2 else parameter.shape[-1]
                parameter.normal_(0.0, fan_in**-0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    tied = known.get_text_config().tie_word_embeddings
    return {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


def _renamed(name: str, renames: Renames) -> str:
    for ours, theirs in renames:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name
