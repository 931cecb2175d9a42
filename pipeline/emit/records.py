"""What an emission is asked for and what it has done."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import Failure
from pipeline.run.images import PageOptions

SHARD_BYTES = 180_000_000


@dataclass(frozen=True, slots=True)
class EmitOptions:
    """What `pipeline emit` was asked for; `shard_bytes` bounds each file of the output."""

    job: Path
    out: Path
    pages: PageOptions
    shard_bytes: int = SHARD_BYTES
    native: bool = False
    base: Path | None = None
    roots: tuple[Path, ...] = ()
    encode: bool = True
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of the output."""

    file: str
    lines: int
    bytes: int


@dataclass(frozen=True, slots=True)
class EmitReport:
    """requests = written + failed; a failed request stands in no file."""

    requests: int
    written: int
    failed: int
    bytes: int
    seconds: float
    shards: tuple[Shard, ...]
    failures: tuple[Failure, ...]

    def as_record(self) -> dict[str, Any]:
        """The `emit --json` record."""
        record = asdict(self) | {"seconds": round(self.seconds, 1)}
        return record | {"failures": [failure.as_record() for failure in self.failures]}


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line of the output, line break included."""

    data: bytes


def batch_line(custom_id: str, url: str, body: dict[str, Any]) -> BatchLine:
    """A line of OpenAI's batch format."""
    record = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return BatchLine(json.dumps(record).encode() + b"\n")
