"""The process that owns vLLM for the `llm` driver: `python -m pipeline.engines.child`.

Requests come as JSON lines on standard input, end-of-file means no more; events go as JSON lines
to a descriptor of their own, since vLLM prints to standard output. Each request goes through
vLLM's own serving objects, exactly as its batch runner does, so an answer is what vLLM's server
would return for the line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from argparse import Namespace
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from pipeline.engines import guard, prompt_embeds
from pipeline.engines.events import Events
from pipeline.engines.last_words import keep_notes
from pipeline.engines.pulse import watch_steps

EXIT_ENGINE_DEAD = 70
EVENTS_ENV = "PIPELINE_EVENTS_FD"


def main() -> None:
    guard.lead_group()
    events = Events(os.fdopen(int(os.environ.pop(EVENTS_ENV)), "wb"))
    try:
        args = _parse_arguments(sys.argv[1:])
    except SystemExit:  # argparse has said why, to the log
        events.send("refused")
        raise
    try:
        asyncio.run(_serve(args, events))
    except Exception as error:
        events.send("failed", cause=f"{type(error).__name__}: {error}")
        raise


def _parse_arguments(arguments: list[str]) -> Namespace:
    from vllm.entrypoints.launchers.run_batch import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # the batch runner's parser has every default that its serving objects read
    parser = make_arg_parser(FlexibleArgumentParser())
    return parser.parse_args(["-i", os.devnull, "-o", os.devnull, *arguments])


async def _serve(args: Namespace, events: Events) -> None:
    from starlette.datastructures import State
    from vllm.entrypoints.launchers.api_server.entry import (
        build_async_engine_client,
        init_app_state,
    )
    from vllm.usage.usage_lib import UsageContext

    watched = watch_steps(lambda: events.send("pulse"))
    context = UsageContext.OPENAI_BATCH_RUNNER
    async with build_async_engine_client(args, usage_context=context) as engine:
        keep_notes()
        state = State()
        await init_app_state(engine, state, args, await engine.get_supported_tasks())
        reports = await engine.collective_rpc("pipeline_tower_report")
        events.send(
            "ready",
            towers=reports,
            max_model_len=engine.vllm_config.model_config.max_model_len,
            pulses=watched and getattr(engine, "logger_manager", None) is not None,
        )
        service = _Service(
            engine,
            state.openai_serving_chat.create_chat_completion,
            events,
            state.online_renderer if args.enable_prompt_embeds else None,
        )
        await _answer_all(service)
    events.send("drained")


@dataclass(frozen=True, slots=True)
class _Service:
    """vLLM's own serving objects; `renderer` where embeddings go into the prompt."""

    engine: Any
    handler: Any
    events: Events
    renderer: Any


async def _answer_all(service: _Service) -> None:
    tasks: set[asyncio.Task[None]] = set()
    async for line in _request_lines():
        task = asyncio.create_task(_answer(service, line))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)


async def _request_lines() -> AsyncIterator[bytes]:
    reader = asyncio.StreamReader(limit=1 << 30)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line


async def _answer(service: _Service, line: bytes) -> None:
    from vllm.entrypoints.launchers import run_batch

    record, engine, events = json.loads(line), service.engine, service.events
    try:
        if service.renderer is not None:
            body = await asyncio.to_thread(prompt_embeds.rewrite, record["body"], service.renderer)
            record["body"] = body
        request = run_batch.BatchRequestInput.model_validate(record)
    except Exception as error:  # vLLM's and pydantic's, or what a template raises: this request's
        events.send("result", output=_rejection(record["custom_id"], str(error)))
        return
    tracker = run_batch.BatchProgressTracker()
    output = await run_batch.run_request(service.handler, request, tracker)
    if engine.errored:
        # whatever came back was made up for a dead engine
        events.send("dead", cause=str(getattr(engine, "dead_error", "the engine died")))
        os._exit(EXIT_ENGINE_DEAD)
    answer = json.loads(output.model_dump_json())
    if service.renderer is not None and (answer["response"] or {}).get("body"):
        body = answer["response"]["body"]
        answer["response"]["body"] = prompt_embeds.restore(body, service.renderer)
    events.send("result", output=answer)


def _rejection(custom_id: str, message: str) -> dict[str, Any]:
    response = {"status_code": 400, "request_id": "", "body": None}
    return {"custom_id": custom_id, "response": response, "error": message}


if __name__ == "__main__":
    main()
