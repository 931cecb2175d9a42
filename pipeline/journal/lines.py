"""Files of JSON lines that are appended to, cut off by crashes, and replaced as a whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO


def complete_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a journal file; a torn last line is ignored."""
    for _, record in json_objects(path):
        yield record


def write_atomically(path: Path, lines: Iterable[bytes]) -> None:
    """Replace `path` by `lines`: temporary file beside it, fsync, rename, fsync directory."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.writelines(lines)
        sync(file)
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def whole_results(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Result lines that are whole: parseable, with our own object."""
    for raw, record in json_objects(path):
        pipeline = record.get("pipeline")
        ours = isinstance(pipeline, dict) and isinstance(pipeline.get("identity"), str)
        if ours and isinstance(record.get("custom_id"), str):
            yield raw.rstrip(b"\r\n") + b"\n", record


def json_objects(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for raw in file:
            try:
                record = json.loads(raw)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield raw, record


def end_torn_line(path: Path) -> None:
    """Give a torn last line its newline, so that the next append starts a line of its own."""
    if path.exists() and not ends_with_newline(path):
        with path.open("ab") as file:
            file.write(b"\n")
            sync(file)


def ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def as_line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
