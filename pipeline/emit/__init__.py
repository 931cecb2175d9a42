"""A job with everything it needs inside, as OpenAI batch lines for another machine.

Embeddings (or, native, page images) stand inline, in files bounded by bytes: vLLM's batch runner
reads a whole file into memory, about three times its size.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.emit.embedded import embedded_lines
from pipeline.emit.native import native_lines
from pipeline.emit.records import SHARD_BYTES, BatchLine, EmitOptions, EmitReport, Shard
from pipeline.emit.shards import publish, write_shards
from pipeline.errors import Failure
from pipeline.run.survey import JobSource, survey_job
from pipeline.store.hold import hold_shared

__all__ = ["SHARD_BYTES", "EmitOptions", "EmitReport", "Shard", "emit_job"]


def emit_job(options: EmitOptions) -> EmitReport:
    """Write the job's lines into numbered files below `out`; one line is in memory at a time.

    The files appear together when all are written; those of an earlier, longer emission go.
    Raises JobError for a job that can't be read or for too little space.
    """
    started = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    cache = hold_shared(options.pages.cache)  # no entry goes before it is written out
    with cache, tempfile.TemporaryDirectory(prefix=".emit-", dir=options.out) as work:
        attachments = Path(work) / "attachments"
        source = JobSource.of(options.job, options.base, options.roots, attachments)
        survey = survey_job(source)
        make_lines = native_lines if options.native else embedded_lines
        failures: list[Failure] = []
        lines = _keep_failures(make_lines(source, survey, options), failures)
        shards = write_shards(lines, Path(work), options.job.stem, options.shard_bytes)
        publish(shards, Path(work), options.out, options.job.stem)
    return EmitReport(
        requests=survey.requests,
        written=sum(shard.lines for shard in shards),
        failed=len(failures),
        bytes=sum(shard.bytes for shard in shards),
        seconds=time.monotonic() - started,
        shards=tuple(shards),
        failures=tuple(failures),
    )


def _keep_failures(
    lines: Iterator[BatchLine | Failure], failures: list[Failure]
) -> Iterator[BatchLine]:
    for line in lines:
        if isinstance(line, Failure):
            failures.append(line)
        else:
            yield line
