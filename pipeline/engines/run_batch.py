"""Driver `run-batch`: vLLM's own batch runner, one process per shard of references.

vLLM up to 0.32 starts all lines of a file at once and writes its output at the end, so a shard
is bounded by the bytes of its embeddings; each attempt has an output file of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import EngineOptions
from pipeline.durable import sync
from pipeline.engines.arguments import ModelSource, engine_arguments, engine_environment
from pipeline.engines.contract import EngineDeath, EngineStarted
from pipeline.engines.llm import result_of
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
        status = self._run_process(files)
        towers = [json.loads(path.read_text()) for path in sorted(files.towers.glob("*.json"))]
        results = _read_output(files.output)
        if towers or results:  # an answer without a report is not believed
            check_tower(towers, self.model)
            yield EngineStarted(tuple(towers), str(files.log))
        yield from results.values()
        unfinished = tuple(request for request in shard if request.custom_id not in results)
        if unfinished:
            raise EngineDeath(
                f"vLLM's batch runner ended with status {status} and left "
                f"{len(unfinished)} of {len(shard)} requests without an answer",
                unfinished,
                ready=bool(towers),
                log=str(files.log),
            )

    def _run_process(self, files: _ShardFiles) -> int | None:
        environment = engine_environment(self.model, self.options)
        environment[TOWER_REPORT_ENV] = str(files.towers)
        arguments = ["-i", str(files.input), "-o", str(files.output)]
        with EngineProcess(
            "pipeline.engines.batch_child",
            arguments + engine_arguments(self.model, self.options),
            environment,
            log=files.log,
            record=self.record,
            events_variable="PIPELINE_UNUSED_FD",
        ) as process:
            while (status := process.wait(2.0)) is None:
                process.remember()
            return status


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
