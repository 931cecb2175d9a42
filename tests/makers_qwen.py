"""Tiny random checkpoints of the Qwen families as they lie on the hub.

Tokenizer (one token per byte) and chat template are the bundled reader's. The weights have unit
gain, so that an embedding depends on every layer and an answer on the image.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from checkpoints import READER, save_weights, write_json

TOKENS = {
    "image_token_id": 262,
    "video_token_id": 263,
    "vision_start_token_id": 259,
    "vision_end_token_id": 260,
}
# heads of 32, of which M-RoPE gives 4 + 6 + 6 pairs to time, height and width
QWEN2_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 320,
    "bos_token_id": 257,
    "eos_token_id": 256,
}
QWEN2_VISION = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 64,
    "mlp_ratio": 2,
    "num_heads": 2,
    "in_chans": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "temporal_patch_size": 2,
}
# layer 0 attends within windows of 4 x 4 patches, layer 1 over the page
QWEN2_5_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "hidden_act": "silu",
    "intermediate_size": 60,
    "num_heads": 2,
    "in_chans": 3,
    "out_hidden_size": 64,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "temporal_patch_size": 2,
    "tokens_per_second": 2,
    "window_size": 56,
    "fullatt_block_indexes": [1],
}
QWEN3_5_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 64,
    "num_heads": 2,
    "in_channels": 3,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "deepstack_visual_indexes": [],
}
# one linear and one full attention layer; a quarter of each head of 64 is rotated
QWEN3_5_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "attn_output_gate": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
    },
    "tie_word_embeddings": False,
    "vocab_size": 320,
    "eos_token_id": 256,
}
QWEN3_5_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]


def make_qwen2_vl(directory: Path, *, seed: int = 0, **layout: Any) -> Path:
    """A random Qwen2-VL; `layout` is of `_write`."""
    vision = QWEN2_VISION | {"model_type": "qwen2_vl"}
    return _make_qwen2(directory, seed, "Qwen2VL", "qwen2_vl", vision, layout)


def make_qwen2_5_vl(directory: Path, *, seed: int = 0, **layout: Any) -> Path:
    """A random Qwen2.5-VL with one windowed and one full layer; `layout` is of `_write`."""
    return _make_qwen2(directory, seed, "Qwen2_5_VL", "qwen2_5_vl", QWEN2_5_VISION, layout)


def make_qwen3_5(directory: Path, *, seed: int = 0, **layout: Any) -> Path:
    """A random Qwen3.5, half of its layers linear attention; `layout` is of `_write`."""
    return _make_qwen3_5(directory, seed, "Qwen3_5", "qwen3_5", QWEN3_5_TEXT, layout)


def make_qwen3_5_moe(directory: Path, *, seed: int = 0, **layout: Any) -> Path:
    """The same with mixture-of-experts layers; `layout` is of `_write`."""
    text = QWEN3_5_TEXT | QWEN3_5_EXPERTS
    return _make_qwen3_5(directory, seed, "Qwen3_5Moe", "qwen3_5_moe", text, layout)


def _make_qwen2(
    directory: Path,
    seed: int,
    class_prefix: str,
    model_type: str,
    vision: dict[str, Any],
    layout: dict[str, Any],
) -> Path:
    """Flat config (the text's settings at the top) and pixel limits by their old names."""
    config = {
        "architectures": [f"{class_prefix}ForConditionalGeneration"],
        "model_type": model_type,
        "torch_dtype": "bfloat16",
        **TOKENS,
        **QWEN2_TEXT,
        "vision_config": vision,
    }
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": f"{class_prefix}Processor",
        "min_pixels": 784,
        "max_pixels": 1_003_520,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    }
    return _write(directory, config, processor, seed, **{"prefix": "visual."} | layout)


def _make_qwen3_5(
    directory: Path,
    seed: int,
    class_prefix: str,
    model_type: str,
    text: dict[str, Any],
    layout: dict[str, Any],
) -> Path:
    config = {
        "architectures": [f"{class_prefix}ForConditionalGeneration"],
        "model_type": model_type,
        **TOKENS,
        "text_config": text | {"model_type": f"{model_type}_text", "dtype": "bfloat16"},
        "vision_config": QWEN3_5_VISION | {"model_type": model_type},
        "tie_word_embeddings": False,
    }
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": 1024, "longest_edge": 1_048_576},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    path = _write(directory, config, processor, seed, **layout)
    shutil.copy(READER / "video_preprocessor_config.json", path)
    return path


def _write(
    directory: Path,
    config: dict[str, Any],
    processor: dict[str, Any],
    seed: int,
    *,
    shards: int = 3,
    prefix: str = "model.visual.",
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Files of a checkpoint in `shards` shards (1: no index).

    With prefix `visual.` the text's tensors are named `model.X`, as before transformers 4.52.
    """
    directory.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(READER / name, directory)
    write_json(directory / "generation_config.json", {"eos_token_id": 256})
    write_json(directory / "config.json", config)
    write_json(directory / "preprocessor_config.json", processor)
    text = "model." if prefix == "visual." else "model.language_model."
    weights = {
        name.replace("model.visual.", prefix).replace("model.language_model.", text): tensor
        for name, tensor in random_weights(directory, seed, dtype).items()
    }
    save_weights(directory, weights, shards)
    return directory


def random_weights(directory: Path, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every tensor of the model that config.json describes, by transformers' names."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(directory)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:  # experts are (expert, out, in), convolutions (out, in, …)
                fan_in = parameter.shape[-1] if ".experts." in name else parameter[0].numel()
                parameter.normal_(0.0, fan_in**-0.5)
    return {name: value.to(dtype).contiguous() for name, value in model.state_dict().items()}
