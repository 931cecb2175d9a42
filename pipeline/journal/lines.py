"""Files of JSON lines that are appended to, cut off by crashes, and replaced as a whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.durable import replace_file, sync
from pipeline.errors import PipelineError


def complete_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a journal file; a torn last line is ignored."""
    for _, record in json_objects(path):
        yield record


def write_atomically(path: Path, lines: Iterable[bytes]) -> None:
    """Replace `path` by `lines`: temporary file beside it, fsync, rename, fsync directory."""
    with writing(path):
        replace_file(path, lines)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into the error that stops the run."""
    try:
        yield
    except OSError as error:
        raise PipelineError(
            f"can't write `{error.filename or path}`: {error.strerror or error}",
            "free space there, or check what it is, and run the same command again; "
            "finished answers are kept",
        ) from error


def whole_results(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Result lines that are whole: parseable, with our own object."""
    for raw, record in json_objects(path):
        pipeline = record.get("pipeline")
        if not isinstance(pipeline, dict) or not isinstance(record.get("custom_id"), str):
            continue
        if isinstance(pipeline.get("identity"), str) and isinstance(pipeline.get("attempts"), int):
            yield raw.rstrip(b"\r\n") + b"\n", record


def json_objects(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for raw in file:
            try:
                record = json.loads(raw)
            except (ValueError, RecursionError):
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
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # a file name that is not UTF-8: as escapes the line stays valid
        return json.dumps(record).encode() + b"\n"
