"""What does it cost to embed patches by a convolution? The same product as a linear layer.

Qwen3-VL's tower as it ships (patches of 2 x 16 x 16 px, 1,152 wide), 4,096 patches of a page of
1 megapixel, one thread. Ratios within one run; the last line is JSON.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch

ROUNDS = 5
PATCHES, WIDTH, SHAPE = 4096, 1152, (3, 2, 16, 16)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    convolution = torch.nn.Conv3d(SHAPE[0], WIDTH, SHAPE[1:], stride=SHAPE[1:])
    linear = torch.nn.Linear(convolution.weight[0].numel(), WIDTH)
    linear.weight.data = convolution.weight.data.flatten(1)
    linear.bias.data = convolution.bias.data
    patches = torch.randn(PATCHES, *SHAPE)
    with torch.inference_mode():
        apart = float((convolution(patches).flatten(1) - linear(patches.flatten(1))).abs().max())
        ratios = {}
        for dtype in (torch.float32, torch.bfloat16):
            name, page = str(dtype).removeprefix("torch."), patches.to(dtype)
            slow = best_s(convolution.to(dtype), page)
            quick = best_s(linear.to(dtype), page.flatten(1))
            ratios[name] = round(slow / quick, 2)
            print(f"{name:<9} convolution {slow:.3f} s, linear {quick:.3f} s: {slow / quick:.1f}")
    print(f"largest difference in float32: {apart:.1e}")
    print(json.dumps({"convolution_to_linear": ratios, "largest_difference": apart}))


def best_s(layer: Any, patches: torch.Tensor) -> float:
    """Quickest of some rounds, in seconds."""
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        layer(patches)
        times.append(time.perf_counter() - started)
    return min(times)


if __name__ == "__main__":
    main()
