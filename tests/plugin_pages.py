"""Pages for the plugin's tests, what transformers' own tower makes of them, and chat parts."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import torch
from checkpoints import load_weights
from PIL import Image

Embedding = tuple[torch.Tensor, list[int]]


def page(seed: int, width: int, height: int) -> Image.Image:
    """Noise in large cells: no two seeds look alike to a random tower."""
    generator = torch.Generator().manual_seed(seed)
    cells = torch.randint(0, 256, (height // 32, width // 32, 3), generator=generator)
    image = Image.fromarray(cells.to(torch.uint8).numpy())
    return image.resize((width, height), Image.Resampling.NEAREST)


def embed(checkpoint: Path, image: Image.Image) -> Embedding:
    """(rows, hidden · (1 + levels)) float32 and the grid [t, h, w] of one page."""
    from transformers import AutoConfig, AutoImageProcessor
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    tower = Qwen3VLVisionModel(AutoConfig.from_pretrained(checkpoint).vision_config).eval()
    prefix = "model.visual."
    weights = load_weights(checkpoint).items()
    tower.load_state_dict(
        {name.removeprefix(prefix): tensor for name, tensor in weights if prefix in name}
    )
    inputs = AutoImageProcessor.from_pretrained(checkpoint)(images=[image], return_tensors="pt")
    with torch.no_grad():
        output = tower(inputs["pixel_values"], inputs["image_grid_thw"])
    rows = torch.cat([output.pooler_output, *output.deepstack_features], dim=1)
    return rows, inputs["image_grid_thw"][0].tolist()


def ask_about(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    text = {"type": "text", "text": "Read the page."}
    return [{"role": "user", "content": [*parts, text]}]


def rows_part(rows: torch.Tensor, grid: list[int]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(rows.clone().contiguous(), buffer)
    return embeds_part(base64.b64encode(buffer.getvalue()).decode(), grid)


def embeds_part(value: str, grid: list[int]) -> dict[str, Any]:
    embeds = {"image_embeds": value, "image_grid_thw": grid}
    return {"type": "image_embeds", "image_embeds": embeds}
