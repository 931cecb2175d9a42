"""What does a vision tower take from each GPU? Counted on the meta device, nothing is loaded.

The sizes are those of the public Qwen3-VL configs; a tower is replicated under tensor
parallelism, so each GPU of a box pays in full. KV tokens are what the same bytes hold: keys and
values of all layers in bfloat16. The last line is JSON.
"""

from __future__ import annotations

import json

import torch
from transformers import Qwen3VLVisionConfig, Qwen3VLVisionModel

# tower: depth, hidden, heads, MLP, output width; text: layers, key-value heads, head dimension
MODELS = {
    "Qwen3-VL-2B": ((24, 1024, 16, 4096, 2048), (28, 8, 128)),
    "Qwen3-VL-8B": ((27, 1152, 16, 4304, 4096), (36, 8, 128)),
}
BF16_BYTES = 2


def main() -> None:
    rows = {name: row(*sizes) for name, sizes in MODELS.items()}
    print(f"{'model':<14}{'tower parameters':>18}{'bytes per GPU':>16}{'KV tokens':>12}")
    for name, (parameters, size, tokens) in rows.items():
        print(f"{name:<14}{parameters / 1e6:>16.0f} M{size / 2**20:>12.0f} MiB{tokens:>12,}")
    print(json.dumps({name: {"parameters": p, "bytes": b} for name, (p, b, _) in rows.items()}))


def row(tower: tuple[int, ...], text: tuple[int, ...]) -> tuple[int, int, int]:
    """Parameters, bytes in bfloat16, and KV tokens that fit into as many bytes."""
    depth, hidden, heads, inner, out = tower
    config = Qwen3VLVisionConfig(
        depth=depth,
        hidden_size=hidden,
        num_heads=heads,
        intermediate_size=inner,
        out_hidden_size=out,
        deepstack_visual_indexes=[depth // 4, depth // 2, 3 * depth // 4],
    )
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Qwen3VLVisionModel(config).parameters())
    layers, kv_heads, head = text
    kv_bytes_per_token = layers * 2 * kv_heads * head * BF16_BYTES
    return parameters, parameters * BF16_BYTES, parameters * BF16_BYTES // kv_bytes_per_token


if __name__ == "__main__":
    main()
