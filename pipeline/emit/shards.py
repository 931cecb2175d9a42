"""Numbered files bounded by bytes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pipeline.durable import sync
from pipeline.emit.records import BatchLine, Shard


def write_shards(
    lines: Iterator[BatchLine], work: Path, stem: str, shard_bytes: int
) -> list[Shard]:
    """Write lines to `work`, a new file where the next line would exceed `shard_bytes`.

    A line longer than that has a file to itself.
    """
    shards: list[Shard] = []
    file: BinaryIO | None = None
    try:
        for line in lines:
            size = len(line.data)
            if file is None or shards[-1].bytes + size > shard_bytes:
                _close(file)
                shards.append(Shard(f"{stem}-{len(shards) + 1:05d}.jsonl", 0, 0))
                file = (work / shards[-1].file).open("wb")
            file.write(line.data)
            last = shards[-1]
            shards[-1] = Shard(last.file, last.lines + 1, last.bytes + size)
    finally:
        _close(file)
    return shards


def _close(file: BinaryIO | None) -> None:
    if file is not None:
        sync(file)
        file.close()


def publish(shards: list[Shard], work: Path, out: Path, stem: str) -> None:
    """Move the finished files in place, and remove those that an earlier emission left."""
    for shard in shards:
        os.replace(work / shard.file, out / shard.file)
    names = {shard.file for shard in shards}
    ours = re.compile(re.escape(stem) + r"-\d{5,}\.jsonl")
    for path in out.iterdir():
        if ours.fullmatch(path.name) and path.name not in names:
            path.unlink()
