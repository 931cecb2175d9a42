"""vLLM's own batch runner under our guards: `python -m pipeline.engines.batch_child ARGUMENTS…`."""

from __future__ import annotations

import runpy

from pipeline.engines import guard

if __name__ == "__main__":
    guard.lead_group()
    runpy.run_module("vllm.entrypoints.openai.run_batch", run_name="__main__", alter_sys=True)
