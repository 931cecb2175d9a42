"""The same checkpoint as others would have written it: other files, other types."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from checkpoints import load_weights, save_weights, write_json
from safetensors.torch import save_file

from pipeline.checkpoint import resolve_model
from pipeline.families import family_of

INDEX = "model.safetensors.index.json"
Weights = dict[str, torch.Tensor]

BLOCK = (16, 24)  # of the block-wise FP8 layout: divides neither side of the tiny towers


def vision_names(directory: Path) -> Callable[[str], bool]:
    """Tells the vision tensors of a checkpoint from its others, by stored name."""
    layout = family_of(resolve_model(str(directory)))
    return lambda name: layout.weight_name(name) is not None


def change_config(directory: Path, **settings: object) -> None:
    """Set entries of config.json."""
    config = json.loads((directory / "config.json").read_text())
    write_json(directory / "config.json", config | settings)


def save_files(directory: Path, files: dict[str, Weights], *, index: bool = True) -> None:
    """Write the weights as these files and no others, with an index of them all."""
    for old in directory.glob("*.safetensors*"):
        old.unlink()
    for file, weights in files.items():
        save_file(weights, directory / file, metadata={"format": "pt"})
    if index:
        weight_map = {name: file for file, weights in files.items() for name in weights}
        write_json(directory / INDEX, {"metadata": {}, "weight_map": weight_map})


def tower_alone(directory: Path, *, index: bool = True) -> str:
    """All text on two shards, the tower on a third; returns its name."""
    is_vision = vision_names(directory)
    weights = load_weights(directory)
    text = sorted(name for name in weights if not is_vision(name))
    files = {
        "model-00001-of-00003.safetensors": {name: weights[name] for name in text[::2]},
        "model-00002-of-00003.safetensors": {name: weights[name] for name in text[1::2]},
        "model-00003-of-00003.safetensors": {n: t for n, t in weights.items() if is_vision(n)},
    }
    save_files(directory, files, index=index)
    return "model-00003-of-00003.safetensors"


def fp8_tower(
    directory: Path,
    kind: str,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    ending: str = "_scale",
    shards: int = 3,
) -> Weights:
    """Quantise the tower's matrices with factors per `tensor`, `channel` or `block`.

    Returns what they are worth, by stored name: value × factor in float32.
    """
    is_vision = vision_names(directory)
    weights, worth = load_weights(directory), {}
    for name in sorted(filter(is_vision, weights)):
        values = weights[name].float()
        if values.ndim == 2 and name.endswith(".weight"):
            factors, spread = _factors(values / torch.finfo(dtype).max, kind)
            weights[name] = (values / spread).to(dtype)
            weights[name + ending] = factors
            weights[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.5)
            worth[name] = weights[name].float() * spread
    save_weights(directory, weights, shards)
    block = {"weight_block_size": list(BLOCK)} if kind == "block" else {}
    change_config(directory, quantization_config={"quant_method": "fp8"} | block)
    return worth


def _factors(values: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors as stored, and one for each value; of (rows, columns)."""
    largest = values.abs()
    if kind == "tensor":
        return largest.max(), largest.max().expand_as(values)
    if kind == "channel":
        rows = largest.amax(1, keepdim=True)
        return rows, rows.expand_as(values)
    high, wide = BLOCK
    blocks = torch.stack(
        [
            torch.stack([part.max() for part in band.split(wide, dim=1)])
            for band in largest.split(high, dim=0)
        ]
    )
    spread = torch.kron(blocks, torch.ones(BLOCK))
    return blocks, spread[: values.shape[0], : values.shape[1]].contiguous()


def quantised_text(directory: Path, kind: str) -> None:
    """Put the names and types of a quantised build where the text model's matrices are."""
    is_vision = vision_names(directory)
    weights: Weights = {}
    for name, tensor in load_weights(directory).items():
        if is_vision(name) or tensor.ndim != 2 or "embed_tokens" in name:
            weights[name] = tensor
        else:
            weights |= quantised(name, tensor, kind)
    save_weights(directory, weights, 3)
    change_config(directory, quantization_config=QUANTISED[kind])


QUANTISED = {
    "awq": {"quant_method": "awq", "bits": 4},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "auto-round": {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "nvfp4": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "w4a16": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "w8a8": {"quant_method": "compressed-tensors", "format": "int-quantized"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "bitsandbytes8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
}


def quantised(name: str, tensor: torch.Tensor, kind: str) -> Weights:
    """What a build of this kind stores for one matrix: right names, types and shapes, no values."""
    rows, columns = tensor.shape
    module = name.removesuffix(".weight")
    eight = torch.float8_e4m3fn
    parts: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "awq": {
            "qweight": (torch.int32, (columns, rows // 8)),
            "qzeros": (torch.int32, (1, rows // 8)),
            "scales": (torch.float16, (1, rows)),
        },
        "gptq": {
            "qweight": (torch.int32, (columns // 8, rows)),
            "qzeros": (torch.int32, (1, rows // 8)),
            "scales": (torch.float16, (1, rows)),
            "g_idx": (torch.int32, (columns,)),
        },
        "fp8": {"weight": (eight, (rows, columns)), "weight_scale_inv": (torch.float32, (1, 1))},
        "nvfp4": {
            "weight_packed": (torch.uint8, (rows, columns // 2)),
            "weight_scale": (eight, (rows, columns // 16)),
            "weight_global_scale": (torch.float32, (1,)),
            "input_global_scale": (torch.float32, (1,)),
        },
        "modelopt": {
            "weight": (torch.uint8, (rows, columns // 2)),
            "weight_scale": (eight, (rows, columns // 16)),
            "weight_scale_2": (torch.float32, ()),
            "input_scale": (torch.float32, ()),
        },
        "w4a16": {
            "weight_packed": (torch.int32, (rows, columns // 8)),
            "weight_scale": (torch.bfloat16, (rows, 1)),
            "weight_shape": (torch.int64, (2,)),
        },
        "w8a8": {
            "weight": (torch.int8, (rows, columns)),
            "weight_scale": (torch.bfloat16, (rows, 1)),
        },
        "bitsandbytes": {
            "weight": (torch.uint8, (rows * columns // 2, 1)),
            "weight.absmax": (torch.float32, (1,)),
            "weight.quant_map": (torch.float32, (16,)),
            "weight.quant_state.bitsandbytes__nf4": (torch.uint8, (64,)),
        },
        "bitsandbytes8": {
            "weight": (torch.int8, (rows, columns)),
            "SCB": (torch.float32, (rows,)),
        },
    }[{"auto-round": "gptq"}.get(kind, kind)]
    return {
        f"{module}.{part}": torch.zeros(shape, dtype=dtype)
        for part, (dtype, shape) in parts.items()
    }
