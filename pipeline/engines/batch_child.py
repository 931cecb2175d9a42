"""vLLM's own batch runner under our guards: `python -m pipeline.engines.batch_child ARGUMENTS…`.

Up to vLLM 0.32 it starts all lines of a file at once and writes its output at the end, if there
is one. Here no more than PIPELINE_MAX_IN_FLIGHT lines are begun at a time, and each answer is
reported as it comes.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
from typing import Any

from pipeline.engines import guard
from pipeline.engines.events import Events
from pipeline.engines.last_words import keep_notes
from pipeline.engines.pulse import watch_steps

EVENTS_ENV = "PIPELINE_EVENTS_FD"
IN_FLIGHT_ENV = "PIPELINE_MAX_IN_FLIGHT"


def main() -> None:
    guard.lead_group()
    events = Events(os.fdopen(int(os.environ.pop(EVENTS_ENV)), "wb"))
    events.send("up", pulses=watch_steps(lambda: events.send("pulse")))
    keep_notes()
    _report_answers(events, int(os.environ.pop(IN_FLIGHT_ENV)))
    runpy.run_module("vllm.entrypoints.openai.run_batch", run_name="__main__", alter_sys=True)


def _report_answers(events: Events, in_flight: int) -> None:
    """Bound what the runner begins, and report answers; if it has changed, it goes its own way."""
    from vllm.entrypoints.launchers import run_batch

    run_request = getattr(run_batch, "run_request", None)
    if run_request is None:
        return
    room = asyncio.Semaphore(in_flight)

    async def reported(handler: Any, request: Any, *rest: Any) -> Any:
        async with room:
            events.send("begun", custom_id=request.custom_id)
            output = await run_request(handler, request, *rest)
            events.send("result", output=json.loads(output.model_dump_json()))
            return output

    run_batch.run_request = reported  # type: ignore[assignment]


if __name__ == "__main__":
    main()
