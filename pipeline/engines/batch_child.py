"""vLLM's own batch runner under our guards: `python -m pipeline.engines.batch_child ARGUMENTS…`."""

from __future__ import annotations

import os
import runpy

from pipeline.engines import guard
from pipeline.engines.last_words import keep_notes
from pipeline.engines.pulse import watch_steps

EVENTS_ENV = "PIPELINE_PULSE_FD"
WATCHED, PULSE = b"w", b"."

if __name__ == "__main__":
    guard.lead_group()
    events = int(os.environ.pop(EVENTS_ENV))
    if watch_steps(lambda: os.write(events, PULSE)):
        os.write(events, WATCHED)
    keep_notes()
    runpy.run_module("vllm.entrypoints.openai.run_batch", run_name="__main__", alter_sys=True)
