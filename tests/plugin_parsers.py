"""What the real vLLM's front end makes of embeddings, without an engine: JSON in, JSON out.

    python tests/plugin_parsers.py results.json < asked.json

asked: [{"model": directory, "embeds": whether the engine takes embeddings, "width": values per row
that our drivers would tell, or null}]; results: for each {"parser": class, "narrow": what became of
rows of 8 columns}, a class or {"error": text}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def main() -> None:
    from vllm.plugins import load_general_plugins

    asked = json.load(sys.stdin)
    load_general_plugins()
    Path(sys.argv[1]).write_text(json.dumps([_try(case) for case in asked]))


def _try(case: dict[str, Any]) -> dict[str, Any]:
    import torch
    from vllm.config import ModelConfig
    from vllm.exceptions import VLLMValidationError
    from vllm.multimodal import MULTIMODAL_REGISTRY

    from pipeline.plugin import ENV_WIDTH

    config = ModelConfig(
        model=case["model"],
        dtype="float32",
        enable_mm_embeds=case["embeds"],
        limit_mm_per_prompt={"image": 1},
    )
    os.environ[ENV_WIDTH] = case["width"] or ""
    parser = MULTIMODAL_REGISTRY.get_processing_info(config).get_data_parser()
    narrow = {"image_embeds": torch.ones(6, 8), "image_grid_thw": torch.tensor([[1, 4, 6]])}
    try:
        became: Any = type(parser._parse_image_data(narrow)).__name__
    except VLLMValidationError as error:
        became = {"error": str(error)}
    return {"parser": type(parser).__name__, "narrow": became}


if __name__ == "__main__":
    main()
