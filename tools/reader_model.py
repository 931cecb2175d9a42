"""The tiny reader's architecture and the files of its checkpoint directory.

Qwen3-VL in small: text 3 x 128, vision 3 x 128, DeepStack after vision layers 0 and 1,
2.2 M parameters, one token per UTF-8 byte.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    GenerationConfig,
    Qwen2Tokenizer,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

SPECIAL_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TOKEN_IDS = {token: 256 + index for index, token in enumerate(SPECIAL_TOKENS)}
# Some room for further tokens, and a multiple of 64 for matrix kernels.
VOCABULARY = 320
WIDTH = 128
PATCH_PX = 16
MERGE = 2
MIN_PIXELS = 1024
MAX_PIXELS = 1048576

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type == 'video' or 'video' in part %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
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


def reader_config() -> Qwen3VLConfig:
    """Widths in channels; the 256 vision positions are a 16 x 16 grid resampled to each image."""
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "initializer_range": 0.02,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "bos_token_id": TOKEN_IDS["<|endoftext|>"],
        "eos_token_id": TOKEN_IDS["<|im_end|>"],
    }
    vision = {
        "depth": 3,
        "hidden_size": WIDTH,
        "intermediate_size": 512,
        "num_heads": 4,
        "patch_size": PATCH_PX,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": WIDTH,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.02,
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=TOKEN_IDS["<|image_pad|>"],
        video_token_id=TOKEN_IDS["<|video_pad|>"],
        vision_start_token_id=TOKEN_IDS["<|vision_start|>"],
        vision_end_token_id=TOKEN_IDS["<|vision_end|>"],
        tie_word_embeddings=True,
        architectures=["Qwen3VLForConditionalGeneration"],
    )


def new_reader(seed: int) -> Qwen3VLForConditionalGeneration:
    """A reader with random float32 weights."""
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(reader_config()).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.normal_(std=weight.shape[1] ** -0.5)
        # Pages are grey and still: weights that start equal over channels and frames stay so.
        weight = model.model.visual.patch_embed.proj.weight
        weight.copy_(
            torch.randn(WIDTH, 1, 1, PATCH_PX, PATCH_PX).expand_as(weight) / (6 * PATCH_PX)
        )
    return model


def byte_characters() -> dict[str, int]:
    """Stand-in of each byte in byte-level BPE: itself if printable, else one from 256 up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + n): byte for n, byte in enumerate(others)
    }


def reader_tokenizer() -> Qwen2Tokenizer:
    """Byte-level BPE without merges: id of a plain token = its byte."""
    vocabulary = byte_characters()
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=8192,
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    ids = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    assert ids == list(TOKEN_IDS.values()), ids
    assert sorted(ByteLevel.alphabet()) == sorted(vocabulary)
    return tokenizer


def shard_of(name: str) -> int:
    """Shard 0 to 2 of a tensor: the tower is split, so it is found only by way of the index."""
    if name.startswith("model.visual."):
        return 2 if name.startswith("model.visual.merger.") else 1
    return 2 if name.startswith("model.language_model.layers.2.") else 0


def save_weights(state: dict[str, torch.Tensor], out: Path) -> None:
    """Write bfloat16 shards and their index."""
    shards: list[dict[str, torch.Tensor]] = [{}, {}, {}]
    for name, tensor in state.items():
        if name != "lm_head.weight":  # tied to the embedding
            shards[shard_of(name)][name] = tensor.detach().to(torch.bfloat16).contiguous()
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-00003.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        (out / file).chmod(0o644)
        weight_map |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(out / "model.safetensors.index.json", index)


def save_reader(state: dict[str, torch.Tensor], out: Path) -> None:
    """Write a complete checkpoint directory that transformers and vLLM load offline."""
    out.mkdir(parents=True, exist_ok=True)
    save_weights(state, out)
    config = reader_config()
    config.dtype = torch.bfloat16
    config.save_pretrained(out)
    eos = [TOKEN_IDS["<|im_end|>"], TOKEN_IDS["<|endoftext|>"]]
    GenerationConfig(
        do_sample=False, eos_token_id=eos, pad_token_id=TOKEN_IDS["<|endoftext|>"]
    ).save_pretrained(out)
    _save_processor(out)


def _save_processor(out: Path) -> None:
    # Literal values: vLLM reads mean and std from this file, not from class defaults.
    pixels = {
        "patch_size": PATCH_PX,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_resize": True,
        "do_convert_rgb": True,
        "resample": 3,
    }
    image = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
    } | pixels
    video = {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "processor_class": "Qwen3VLProcessor",
    } | pixels
    _write_json(out / "preprocessor_config.json", image)
    _write_json(out / "video_preprocessor_config.json", video)
    tokenizer = reader_tokenizer()
    tokenizer.save_pretrained(out)
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    shutil.rmtree(out / "__pycache__", ignore_errors=True)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
