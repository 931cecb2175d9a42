"""Driver `run-batch`: vLLM's own batch runner, one process per file of references.

A file is bounded by its own bytes, which the runner holds in memory, and ends at barriers. Each
attempt has an output file of its own; answers are taken as the child reports them, and what it
did not report from there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.config import EngineOptions, cpu_build_installed
from pipeline.durable import sync
from pipeline.engines.arguments import ModelSource, engine_arguments, engine_environment
from pipeline.engines.batch_child import EVENTS_ENV, IN_FLIGHT_ENV
from pipeline.engines.contract import EngineDeath, EngineStarted
from pipeline.engines.events import CLOSED, EventStream
from pipeline.engines.last_words import root_cause
from pipeline.engines.llm import result_of
from pipeline.engines.memory import with_less_memory
from pipeline.engines.process import GRACE_S, EngineProcess
from pipeline.engines.tower import check_tower
from pipeline.jobs import Request, Result

TOWER_REPORT_ENV = "PIPELINE_TOWER_REPORT"
_COPIES = 4  # of its input that the runner holds, and some


@dataclass(frozen=True, slots=True)
class RunBatchEngine:
    """See `contract.Engine`. `attempts` holds each shard's input, output and log."""

    model: ModelSource
    options: EngineOptions
    attempts: Path
    record: Path

    def run(self, requests: Iterator[Request | None]) -> Iterator[Result | EngineStarted]:
        for shard in shards(requests, self.options.in_flight_limit_bytes // _COPIES):
            yield from _Shard(self, shard).run()

    def with_less_memory(self) -> RunBatchEngine | None:
        options = with_less_memory(self.options, cpu=cpu_build_installed())
        return None if options is None else replace(self, options=options)

    def settings(self) -> EngineOptions:
        return self.options


@dataclass(slots=True)
class _Shard:
    """One life of the batch runner."""

    engine: RunBatchEngine
    requests: list[Request]
    stem: str = field(default_factory=lambda: f"batch-{time.time_ns()}")
    begun: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    ready: bool = False
    cause: str = ""

    def run(self) -> Iterator[Result | EngineStarted]:
        """Answers as they come; raises EngineDeath if some don't."""
        _write_shard(self._path(".jsonl"), self.requests)
        with self._start() as process:
            yield from self._reported(process)
            status = process.wait(0 if self.cause else GRACE_S)
        for result in _read_output(self._path("-output.jsonl")):
            yield from self._take(result)
        left = [request for request in self.requests if request.custom_id not in self.answered]
        if left:
            raise self._death(process, status, left)

    def _start(self) -> EngineProcess:
        model, options = self.engine.model, self.engine.options
        environment = engine_environment(model, options)
        environment[TOWER_REPORT_ENV] = str(self._path("-towers"))
        environment[IN_FLIGHT_ENV] = str(2 * options.max_num_seqs)
        files = ["-i", str(self._path(".jsonl")), "-o", str(self._path("-output.jsonl"))]
        return EngineProcess(
            "pipeline.engines.batch_child",
            files + engine_arguments(model, options),
            environment,
            log=self._path(".log"),
            record=self.engine.record,
            events_variable=EVENTS_ENV,
        )

    def _reported(self, process: EngineProcess) -> Iterator[Result | EngineStarted]:
        """Answers that the child reports, until it ends or hangs."""
        options, stream = self.engine.options, EventStream(process.events)
        heard_s, watched, stepped = time.monotonic(), False, False
        while (event := stream.next(2.0)) is not CLOSED:
            if event is None:
                process.remember()
                limit_s = options.stall_timeout_s if stepped else options.start_timeout_s
                if watched and time.monotonic() - heard_s > limit_s:
                    what = "made no step" if stepped else "was not up"
                    self.cause = f"vLLM's batch runner {what} within {limit_s:.0f} s"
                    return
                continue
            heard_s = time.monotonic()
            match event["event"]:
                case "up":
                    watched = event["pulses"]
                case "pulse":
                    stepped = True
                case "begun":
                    self.begun.add(event["custom_id"])
                case "result":
                    yield from self._take(result_of(event["output"]))

    def _take(self, result: Result) -> Iterator[Result | EngineStarted]:
        # a 5xx is no answer: a dead engine gives one to all
        if result.status_code < 500 and result.custom_id not in self.answered:
            if not self.ready:
                yield self._started()
            self.answered.add(result.custom_id)
            yield result

    def _started(self) -> EngineStarted:
        """An answer without a report of the towers is not believed."""
        towers = self._towers()
        check_tower(towers, self.engine.model)
        self.ready = True
        return EngineStarted(tuple(towers), str(self._path(".log")))

    def _towers(self) -> list[dict[str, object]]:
        found = sorted(self._path("-towers").glob("*.json"))
        return [json.loads(path.read_text()) for path in found]

    def _death(
        self, process: EngineProcess, status: int | None, left: list[Request]
    ) -> EngineDeath:
        note = root_cause(process.notes)
        cause = self.cause or f"vLLM's batch runner ended with status {status}"
        return EngineDeath(
            (f"{cause}: {note}" if note else cause)
            + f"; {len(left)} of {len(self.requests)} requests have no answer",
            tuple(request for request in left if request.custom_id in self.begun),
            waiting=tuple(request for request in left if request.custom_id not in self.begun),
            ready=bool(self._towers()),
            log=str(self._path(".log")),
            out_of_memory=note is not None and note.out_of_memory,
            hopeless=note is not None and note.hopeless,
        )

    def _path(self, ending: str) -> Path:
        return self.engine.attempts / f"{self.stem}{ending}"


def shards(requests: Iterator[Request | None], max_bytes: int) -> Iterator[list[Request]]:
    """Group requests by the bytes of their lines; a barrier (None) ends a group."""
    shard: list[Request] = []
    size = 0
    for request in requests:
        line_bytes = 0 if request is None else len(json.dumps(request.as_line()))
        if shard and (request is None or size + line_bytes > max_bytes):
            yield shard
            shard, size = [], 0
        if request is not None:
            shard.append(request)
            size += line_bytes
    if shard:
        yield shard


def _write_shard(path: Path, shard: list[Request]) -> None:
    with path.open("wb") as file:
        for request in shard:
            file.write(json.dumps(request.as_line()).encode() + b"\n")
        sync(file)


def _read_output(path: Path) -> Iterator[Result]:
    if path.exists():
        with path.open(encoding="utf-8") as file:
            for line in file:
                yield result_of(json.loads(line))
