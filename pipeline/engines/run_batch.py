"""Driver `run-batch`: vLLM's own batch runner, one process per shard of references.

vLLM up to 0.32 starts all lines of a file at once and writes its output at the end, so a shard
is bounded by the bytes of its embeddings; each attempt has an output file of its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.config import EngineOptions, cpu_build_installed
from pipeline.durable import sync
from pipeline.engines.arguments import ModelSource, engine_arguments, engine_environment
from pipeline.engines.batch_child import EVENTS_ENV, PULSE, WATCHED
from pipeline.engines.contract import EngineDeath, EngineStarted
from pipeline.engines.last_words import root_cause
from pipeline.engines.llm import result_of
from pipeline.engines.memory import with_less_memory
from pipeline.engines.process import EngineProcess
from pipeline.engines.tower import check_tower
from pipeline.jobs import Request, Result

TOWER_REPORT_ENV = "PIPELINE_TOWER_REPORT"


@dataclass(frozen=True, slots=True)
class RunBatchEngine:
    """See `contract.Engine`. `attempts` holds each shard's input, output and log."""

    model: ModelSource
    options: EngineOptions
    attempts: Path
    record: Path

    def run(self, requests: Iterator[Request | None]) -> Iterator[Result | EngineStarted]:
        for shard in shards(requests, self.options.in_flight_limit_bytes):
            yield from self._run_shard(shard)

    def _run_shard(self, shard: list[Request]) -> Iterator[Result | EngineStarted]:
        stem = self.attempts / f"batch-{time.time_ns()}"
        files = _ShardFiles(
            Path(f"{stem}.jsonl"),
            Path(f"{stem}-output.jsonl"),
            Path(f"{stem}.log"),
            Path(f"{stem}-towers"),
        )
        _write_shard(files.input, shard)
        cause, out_of_memory = self._run_process(files)
        towers = [json.loads(path.read_text()) for path in sorted(files.towers.glob("*.json"))]
        results = _read_output(files.output)
        if towers or results:  # an answer without a report is not believed
            check_tower(towers, self.model)
            yield EngineStarted(tuple(towers), str(files.log))
        yield from results.values()
        unfinished = tuple(request for request in shard if request.custom_id not in results)
        if unfinished:
            raise EngineDeath(
                f"{cause}; {len(unfinished)} of {len(shard)} requests have no answer",
                unfinished,
                ready=bool(towers),
                log=str(files.log),
                out_of_memory=out_of_memory,
            )

    def with_less_memory(self) -> RunBatchEngine | None:
        options = with_less_memory(self.options, cpu=cpu_build_installed())
        return None if options is None else replace(self, options=options)

    def settings(self) -> EngineOptions:
        return self.options

    def _run_process(self, files: _ShardFiles) -> tuple[str, bool]:
        """How the batch runner ended, for people, and whether for want of memory."""
        environment = engine_environment(self.model, self.options)
        environment[TOWER_REPORT_ENV] = str(files.towers)
        arguments = ["-i", str(files.input), "-o", str(files.output)]
        with EngineProcess(
            "pipeline.engines.batch_child",
            arguments + engine_arguments(self.model, self.options),
            environment,
            log=files.log,
            record=self.record,
            events_variable=EVENTS_ENV,
        ) as process:
            watch = _Watch(process.events.fileno(), self.options)
            while (status := process.wait(2.0)) is None and not watch.stalled():
                process.remember()
        note = root_cause(process.notes)
        cause = watch.cause or f"vLLM's batch runner ended with status {status}"
        return (
            f"{cause}: {note}" if note else cause,
            note is not None and note.out_of_memory,
        )


class _Watch:
    """Tells from its signs of life whether a batch runner hangs."""

    def __init__(self, descriptor: int, options: EngineOptions) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor, self._options = descriptor, options
        self._heard_s, self._watched, self._steps = time.monotonic(), False, False
        self.cause = ""

    def stalled(self) -> bool:
        """True if it was silent for too long; `cause` says so."""
        try:
            heard = os.read(self._descriptor, 1 << 16)
        except BlockingIOError:
            heard = b""
        if heard:
            self._heard_s = time.monotonic()
            self._watched |= WATCHED in heard
            self._steps |= PULSE in heard
        limit_s = self._options.stall_timeout_s if self._steps else self._options.start_timeout_s
        silent = self._watched and time.monotonic() - self._heard_s > limit_s
        if silent:
            what = "made no step" if self._steps else "was not up"
            self.cause = f"vLLM's batch runner {what} within {limit_s:.0f} s"
        return silent


@dataclass(frozen=True, slots=True)
class _ShardFiles:
    input: Path
    output: Path
    log: Path
    towers: Path


def shards(requests: Iterator[Request | None], max_bytes: int) -> Iterator[list[Request]]:
    """Group requests by the bytes of their embeddings; a barrier (None) ends a group."""
    shard: list[Request] = []
    size = 0
    for request in requests:
        if shard and (request is None or size + request.embedding_bytes > max_bytes):
            yield shard
            shard, size = [], 0
        if request is not None:
            shard.append(request)
            size += request.embedding_bytes
    if shard:
        yield shard


def _write_shard(path: Path, shard: list[Request]) -> None:
    with path.open("wb") as file:
        for request in shard:
            file.write(json.dumps(request.as_line()).encode() + b"\n")
        sync(file)


def _read_output(path: Path) -> dict[str, Result]:
    """Answers of a shard by custom_id. A 5xx row is no answer: a dead engine gives one to all."""
    results: dict[str, Result] = {}
    if path.exists():
        with path.open(encoding="utf-8") as file:
            for line in file:
                result = result_of(json.loads(line))
                if result.status_code < 500:
                    results[result.custom_id] = result
    return results
