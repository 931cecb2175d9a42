"""A real engine in a process of its own: JSON options and requests in, JSON answers out.

    python tests/plugin_engine.py answers.json < asked.json

asked: {"options": {…of LLM…}, "requests": {name: messages}}; answers.json: {"answers": {name:
answer}, "reports": […]}, an answer being {"tokens": […], "logprobs": […]} (of those tokens) or
{"error": text}. Not on standard output: the engine's processes log there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def ask(
    model: Path,
    requests: dict[str, Any],
    *,
    tower: bool,
    dtype: str = "float32",
    modalities: tuple[str, ...] = ("image", "video"),
    environment: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Answers of a fresh engine with the tower loaded or absent."""
    from pipeline.plugin import WORKER_EXTENSION

    limits = dict.fromkeys(modalities, 0) | ({"image": 2} if tower else {})
    options = {
        "model": str(model),
        "dtype": dtype,
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "enforce_eager": True,
        "limit_mm_per_prompt": limits,
        "enable_mm_embeds": True,
        "worker_extension_cls": WORKER_EXTENSION,
    }
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "answers.json"
        done = subprocess.run(
            [sys.executable, __file__, path],
            input=json.dumps({"options": options, "requests": requests}),
            capture_output=True,
            text=True,
            timeout=600,
            env=os.environ | ENVIRONMENT | (environment or {}),
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(path.read_text())


def main() -> None:
    from vllm import LLM

    asked = json.load(sys.stdin)
    llm = LLM(**asked["options"])
    answers = {name: _answer(llm, messages) for name, messages in asked["requests"].items()}
    reports = llm.collective_rpc("pipeline_tower_report")
    Path(sys.argv[1]).write_text(json.dumps({"answers": answers, "reports": reports}))


def _answer(llm: Any, messages: list[Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=1)
    try:
        (output,) = llm.chat(messages, sampling, use_tqdm=False)
    except Exception as error:
        return {"error": str(error)}
    answer = output.outputs[0]
    tokens = list(answer.token_ids)
    chosen = [step[token].logprob for step, token in zip(answer.logprobs, tokens, strict=True)]
    return {"tokens": tokens, "logprobs": chosen}


if __name__ == "__main__":
    main()
