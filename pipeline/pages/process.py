"""One decoding process, seen from the process that started it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from pipeline.errors import Failure, Reason, Stage
from pipeline.pages.records import MAX_PAGE_PIXELS, Page, Pixels, SourceFile
from pipeline.pages.requests import DecodeLimits, DecodeRequest

PAGES_AHEAD = 2  # decoded and not yet taken
_KEPT_BYTES = 64 << 20  # memory of a place that is not given back: new pages of it cost time
_START_S = 120.0
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


class LostError(Exception):
    """The process is gone, or was ended since it took too long."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class DecodingProcess:
    """One process, started at once; what it says is in `pipeline.pages.worker`."""

    def __init__(self, limits: DecodeLimits) -> None:
        self._places = [os.memfd_create("page", os.MFD_CLOEXEC) for _ in range(PAGES_AHEAD)]
        numbers = map(str, self._places)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "pipeline.pages.worker", str(limits.memory_bytes), *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            pass_fds=self._places,
            env=os.environ | _ONE_THREAD,
        )
        self._heard = b""
        self._started = False
        self.ended = False

    def ask(self, request: DecodeRequest) -> None:
        """Send a request; `answers` must be taken before the next."""
        self._send(b"R" + pickle.dumps(request))

    def count(self, file: SourceFile, limit_s: float) -> int | None:
        """Pages that a file announces; None if the process was lost over it."""
        self._send(b"C" + pickle.dumps(file))
        try:
            self._await_start()
            return int(json.loads(self._line(limit_s))["count"])
        except (LostError, ValueError, KeyError, TypeError):
            self.end()
            return None

    def _await_start(self) -> None:
        if not self._started:
            self._line(_START_S)
            self._started = True

    def answers(self, request: DecodeRequest, page_s: float) -> Iterator[Page | Failure]:
        """What comes back for a request; raises LostError."""
        self._await_start()
        while True:
            try:
                record = json.loads(self._line(page_s))
                if "end" in record:
                    return
                if "failure" in record:
                    answer: Page | Failure = _failure_of(record["failure"])
                else:
                    rgb = self._take(record)
                    answer = Page(request.file, int(record["page"]), rgb, bool(record["partial"]))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise LostError(Reason.CRASHED, "the decoder went astray") from error
            yield answer

    def _take(self, record: dict[str, Any]) -> Pixels:
        """Copy a page's pixels, and let the process use their place again."""
        height_px, width_px = int(record["height_px"]), int(record["width_px"])
        if not 0 < height_px * width_px <= MAX_PAGE_PIXELS or min(height_px, width_px) < 1:
            raise ValueError(f"{width_px} x {height_px} px")
        rgb = np.empty((height_px, width_px, 3), np.uint8)
        place, rest, at = self._places[record["place"]], rgb.data.cast("B"), 0
        while rest:
            count = os.preadv(place, [rest], at)
            if not count:
                raise ValueError("the pixels end early")
            at, rest = at + count, rest[count:]
        if at > _KEPT_BYTES:
            os.ftruncate(place, 0)
        self._send(b".")
        return rgb

    def _send(self, data: bytes) -> None:
        pipe = self._child.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # the next line that is waited for tells
            rest = memoryview(data)
            while rest:
                rest = rest[pipe.write(rest) or 0 :]

    def _line(self, limit_s: float) -> bytes:
        pipe = self._child.stdout
        assert pipe is not None
        until = time.monotonic() + limit_s
        while b"\n" not in self._heard:
            ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise LostError(Reason.TIMED_OUT, f"decoding a page took more than {limit_s:g} s")
            heard = os.read(pipe.fileno(), 1 << 16)
            if not heard:
                raise LostError(Reason.CRASHED, self._epitaph())
            self._heard += heard
        line, self._heard = self._heard.split(b"\n", 1)
        return line

    def _epitaph(self) -> str:
        status = self._child.wait()
        if status < 0:
            return f"the decoder was ended by {signal.Signals(-status).name}"
        return f"the decoder ended with status {status}"

    def end(self) -> None:
        """Kill the process, whatever it does; may be called again."""
        if self.ended:
            return
        self.ended = True
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()
        for place in self._places:
            os.close(place)


def _failure_of(record: dict[str, Any]) -> Failure:
    page = None if record["page"] is None else int(record["page"])
    stage, reason = Stage(record["stage"]), Reason(record["reason"])
    return Failure(
        str(record["file"]),
        page,
        stage,
        reason,
        str(record["detail"]),
        retryable=bool(record["retryable"]),
    )
