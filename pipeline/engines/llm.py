"""Driver `llm`: vLLM in a child process, fed continuously, embeddings by reference.

The window of unfinished requests is bounded by number and by the bytes of their embeddings, so
neither this process nor the child grows with the length of the job.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.config import EngineOptions, cpu_build_installed
from pipeline.engines.arguments import ModelSource, engine_arguments, engine_environment
from pipeline.engines.child import EVENTS_ENV
from pipeline.engines.contract import EngineDeath, EngineStarted
from pipeline.engines.events import EventStream
from pipeline.engines.last_words import root_cause
from pipeline.engines.memory import with_less_memory
from pipeline.engines.process import GRACE_S, EngineProcess
from pipeline.engines.tower import check_tower
from pipeline.errors import UsageError
from pipeline.jobs import Request, Result


@dataclass(frozen=True, slots=True)
class LlmEngine:
    """See `contract.Engine`. `attempts` is the directory for logs, `record` for process ids.

    `share` is environment of this engine's own: the GPUs or cores of one among several.
    """

    model: ModelSource
    options: EngineOptions
    attempts: Path
    record: Path
    share: Mapping[str, str] = field(default_factory=dict)

    def run(self, requests: Iterator[Request | None]) -> Iterator[Result | EngineStarted]:
        first = next((request for request in requests if request is not None), None)
        if first is None:
            return  # nothing to do starts nothing
        with self._start() as process:
            session = _Session(process, self.options)
            yield session.wait_until_ready(self.model, unfinished=first)
            process.remember()
            yield from session.pump(first, requests)
            process.close_requests()
            process.wait(GRACE_S)

    def with_less_memory(self) -> LlmEngine | None:
        options = with_less_memory(self.options, cpu=cpu_build_installed())
        return None if options is None else replace(self, options=options)

    def settings(self) -> EngineOptions:
        return self.options

    def _start(self) -> EngineProcess:
        return EngineProcess(
            "pipeline.engines.child",
            engine_arguments(self.model, self.options),
            engine_environment(self.model, self.options) | dict(self.share),
            log=self.attempts / f"{self.record.stem}-{time.time_ns()}.log",
            record=self.record,
            events_variable=EVENTS_ENV,
        )


class _Session:
    """One life of the child, from its start to its last answer."""

    def __init__(self, process: EngineProcess, options: EngineOptions) -> None:
        self._process, self._options = process, options
        self._limit_bytes = options.in_flight_limit_bytes
        self._flying: dict[str, Request] = {}
        self._flying_bytes = 0
        self._ready = False
        self._stall_timeout_s: float | None = None
        self._events = EventStream(process.events)

    def wait_until_ready(self, model: ModelSource, *, unfinished: Request) -> EngineStarted:
        """Return when the engine is up and its tower is where it should be.

        Raises EngineDeath if it does not come up, PipelineError if the tower is loaded.
        """
        self._take_off(unfinished, send=False)
        event = self._next_event(self._options.start_timeout_s)
        if event["event"] == "refused":
            raise UsageError(
                f"vLLM refuses its arguments: {self._process.last_words()}",
                "check `--engine-arg NAME=VALUE`",
            )
        if event["event"] != "ready":
            raise self._death(event)
        check_tower(event["towers"], model)
        if event["pulses"]:
            self._stall_timeout_s = self._options.stall_timeout_s
        self._ready = True
        return EngineStarted(tuple(event["towers"]), str(self._process.log))

    def pump(self, first: Request, requests: Iterator[Request | None]) -> Iterator[Result]:
        """Keep the window full and yield answers as they come."""
        self._send(first)
        exhausted = barrier = False
        while True:
            while not (exhausted or barrier) and self._has_room():
                try:
                    request = next(requests)
                except StopIteration:
                    exhausted = True
                else:
                    barrier = request is None
                    if request is not None:
                        self._take_off(request, send=True)
            if not self._flying:
                if exhausted:
                    return
                barrier = False
                continue
            event = self._next_event(self._stall_timeout_s)
            if event["event"] != "pulse":
                yield self._landed(event)

    def _has_room(self) -> bool:
        # twice what the engine runs at once: the next ones are rendered while it computes
        return not self._flying or (
            len(self._flying) < 2 * self._options.max_num_seqs
            and self._flying_bytes < self._limit_bytes
        )

    def _take_off(self, request: Request, *, send: bool) -> None:
        self._flying[request.custom_id] = request
        self._flying_bytes += request.embedding_bytes
        if send:
            self._send(request)

    def _send(self, request: Request) -> None:
        try:
            self._process.requests.write(json.dumps(request.as_line()).encode() + b"\n")
            self._process.requests.flush()
        except BrokenPipeError:
            pass  # the closed event stream tells

    def _landed(self, event: dict[str, Any]) -> Result:
        if event["event"] != "result":
            raise self._death(event)
        result = result_of(event["output"])
        request = self._flying.pop(result.custom_id)
        self._flying_bytes -= request.embedding_bytes
        return result

    def _next_event(self, timeout_s: float | None) -> dict[str, Any]:
        event = self._events.next(timeout_s)
        if event is None:
            what = "made no step" if self._ready else "was not up"
            return {"event": "timeout", "cause": f"the engine {what} within {timeout_s:.0f} s"}
        return event

    def _death(self, event: dict[str, Any]) -> EngineDeath:
        status = None if event["event"] == "timeout" else self._process.wait(0.5)
        note = root_cause(self._process.notes)
        cause = str(note) if note else event.get("cause")
        if cause is None:
            cause = f"the engine process ended with status {status}: {self._process.last_words()}"
        return EngineDeath(
            cause,
            tuple(self._flying.values()),
            ready=self._ready,
            log=str(self._process.log),
            out_of_memory=note is not None and note.out_of_memory,
            hopeless=note is not None and note.hopeless,
        )


def result_of(output: dict[str, Any]) -> Result:
    """A line of vLLM's batch output as a Result.

    `error` there is None, a string, or an ErrorResponse whose message lies one level down.
    """
    response, error = output["response"] or {}, output.get("error")
    if isinstance(error, dict):
        inner = error.get("error", error)
        error = inner.get("message", json.dumps(inner)) if isinstance(inner, dict) else inner
    return Result(
        custom_id=output["custom_id"],
        status_code=int(response.get("status_code", 500)),
        request_id=response.get("request_id", ""),
        body=response.get("body"),
        error=None if error is None else str(error),
    )
