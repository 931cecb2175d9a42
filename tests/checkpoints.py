"""Tiny checkpoints with random weights, as directories that transformers and vLLM load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

torch.set_num_threads(1)

READER = Path(__file__).parents[1] / "pipeline" / "models" / "tiny-reader"

VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MOE_TEXT = {
    "model_type": "qwen3_vl_moe_text",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def make_qwen3_vl(
    directory: Path,
    *,
    seed: int = 0,
    moe: bool = False,
    shards: int = 3,
    prefix: str = "model.visual.",
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """A random Qwen3-VL of a few hundred thousand parameters in `shards` files (1: no index).

    Tokenizer (one token per byte), chat template and processor are the bundled reader's.
    """
    directory.mkdir(parents=True)
    for path in READER.iterdir():
        if path.suffix in {".json", ".jinja"} and "safetensors" not in path.name:
            shutil.copy(path, directory / path.name)
    write_json(directory / "config.json", _config(moe))
    weights = {
        name.replace("model.visual.", prefix): tensor.to(dtype)
        for name, tensor in _random_weights(directory, seed).items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    if moe:
        weights = {name: _as_on_the_hub(name, tensor) for name, tensor in weights.items()}
    save_weights(directory, weights, shards)
    return directory


def _config(moe: bool) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((READER / "config.json").read_text())
    config["vision_config"] |= VISION
    config["text_config"] |= TEXT
    if moe:
        config["architectures"] = ["Qwen3VLMoeForConditionalGeneration"]
        config["model_type"] = "qwen3_vl_moe"
        config["vision_config"]["model_type"] = "qwen3_vl_moe_vision"
        config["text_config"] |= MOE_TEXT
    return config


def _random_weights(directory: Path, seed: int) -> dict[str, torch.Tensor]:
    """Weights of unit gain, so that an embedding depends on every layer."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(directory))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                fan_in = parameter[0].numel() if parameter.ndim > 2 else parameter.shape[-1]
                parameter.normal_(0.0, fan_in**-0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


def _as_on_the_hub(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """transformers keeps experts as (experts, out, in), the hub and vLLM as (experts, in, out)."""
    fused = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    return tensor.transpose(1, 2).contiguous() if fused else tensor


def save_weights(directory: Path, weights: dict[str, torch.Tensor], shards: int) -> None:
    """Deal the tensors out to `shards` files, with an index if there are several."""
    for old in directory.glob("model*.safetensors*"):
        old.unlink()
    if shards == 1:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = [f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)]
    weight_map = {name: names[place % shards] for place, name in enumerate(weights)}
    for shard in names:
        part = {name: tensor for name, tensor in weights.items() if weight_map[name] == shard}
        save_file(part, directory / shard, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    write_json(directory / "model.safetensors.index.json", index)


def load_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, to write it again changed."""
    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        weights |= load_file(path)
    return weights


def write_json(path: Path, value: object) -> None:
    """JSON with a line break at its end."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
