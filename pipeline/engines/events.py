"""What a child reports, as JSON lines on a descriptor of its own."""

from __future__ import annotations

import json
import queue
import threading
from typing import Any, BinaryIO

CLOSED: dict[str, Any] = {"event": "closed"}


class Events:
    """The child's end: one line per event, whole or absent."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def send(self, event: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, **fields}).encode() + b"\n")
        self._file.flush()


class EventStream:
    """The driver's end: read in a thread, so that one can wait for an event and give up."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._queue: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="engine events", daemon=True).start()

    def _read(self) -> None:
        try:
            for line in self._file:
                self._queue.put(json.loads(line))
        except ValueError:  # the file was closed under us, or a line was torn by a kill
            pass
        self._queue.put(CLOSED)

    def next(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next event, CLOSED after the last one; None if none comes in time."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None
