"""Random Qwen3-VL checkpoints, dense and MoE, and what transformers' own tower makes of a page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file

READER = Path(__file__).parents[1] / "pipeline" / "models" / "tiny-reader"
MOE_TEXT = {
    "model_type": "qwen3_vl_moe_text",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def make_qwen3_vl(directory: Path, *, seed: int = 0, moe: bool = False) -> Path:
    """The bundled reader's tokenizer and processor around random weights of its shapes."""
    directory.mkdir(parents=True)
    for path in READER.iterdir():
        if path.suffix in {".json", ".jinja"} and "safetensors" not in path.name:
            shutil.copy(path, directory / path.name)
    config = json.loads((READER / "config.json").read_text())
    if moe:
        config["architectures"] = ["Qwen3VLMoeForConditionalGeneration"]
        config["model_type"] = "qwen3_vl_moe"
        config["vision_config"]["model_type"] = "qwen3_vl_moe_vision"
        config["text_config"] |= MOE_TEXT
    (directory / "config.json").write_text(json.dumps(config))
    model = _random_model(directory, seed)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    weights.pop("lm_head.weight", None)  # tied
    if moe:
        weights = {name: _as_on_the_hub(name, tensor) for name, tensor in weights.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _as_on_the_hub(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """transformers keeps experts as (experts, out, in), the hub and vLLM as (experts, in, out)."""
    fused = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    return tensor.transpose(1, 2).contiguous() if fused else tensor


def _random_model(directory: Path, seed: int) -> Any:
    """Weights large enough for the answer to depend on the image, float32."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(directory)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model


def embed(directory: Path, image: Image.Image, *, seed: int) -> Any:
    """(rows, hidden · (1 + levels)) float32 and the grid [t, h, w] of one page."""
    from transformers import AutoImageProcessor

    inputs = AutoImageProcessor.from_pretrained(directory)(images=[image], return_tensors="pt")
    model = _random_model(directory, seed)
    with torch.no_grad():
        output = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    levels = [torch.cat(tuple(level)) for level in output.deepstack_features]
    rows = torch.cat([torch.cat(tuple(output.pooler_output)), *levels], dim=1)
    return rows, inputs["image_grid_thw"][0].tolist()


def page(seed: int, width: int, height: int) -> Image.Image:
    """Noise in large cells: no two seeds look alike to a random tower."""
    generator = torch.Generator().manual_seed(seed)
    cells = torch.randint(0, 256, (height // 32, width // 32, 3), generator=generator)
    image = Image.fromarray(cells.to(torch.uint8).numpy())
    return image.resize((width, height), Image.Resampling.NEAREST)
