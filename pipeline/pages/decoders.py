"""Decode in processes of their own: a crash, a hang or hunger for memory costs one document.

They work ahead: while one page is encoded, the next ones are decoded.
"""

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
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Self, TypeVar

import numpy as np

from pipeline.errors import Failure, Reason, Stage
from pipeline.pages.records import MAX_PAGE_PIXELS, Page, Pixels, behind
from pipeline.pages.requests import DEFAULT_LIMITS, DecodeLimits, DecodeRequest

Item = TypeVar("Item")

PAGES_AHEAD = 2  # of each process, decoded and not yet taken
_ITEMS_AHEAD = 16
_START_S = 120.0
_MAX_DEATHS = 3  # of the process, within one document
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


class _LostError(Exception):
    """The process is gone, or was ended since it took too long."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Decoders:
    """Up to `processes` decoding processes, each started when it is first needed."""

    def __init__(self, processes: int = 1, limits: DecodeLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._free: list[_Process | None] = [None] * processes  # None: not started yet
        self._all: list[_Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._all:
            process.end()

    def ahead(
        self, items: Iterable[tuple[Item, DecodeRequest | None]]
    ) -> Iterator[tuple[Item, Iterator[Page | Failure]]]:
        """Each item with the pages of its request, in order; items without one have none.

        Requests behind the one whose pages are taken are worked on already. The pages of an item
        must be taken before the next item is.
        """
        waiting: deque[tuple[Item, _Stream | None]] = deque()
        source = iter(items)
        try:
            more = True
            while more or waiting:
                while more and self._free and len(waiting) < _ITEMS_AHEAD:
                    found = next(source, None)
                    if found is None:
                        more = False
                        break
                    item, request = found
                    waiting.append((item, None if request is None else self._begin(request)))
                if waiting:
                    item, stream = waiting[0]
                    yield item, iter(()) if stream is None else stream.pages()
                    waiting.popleft()
                    if stream is not None:
                        self._free.append(stream.close())
        finally:
            for _, stream in waiting:
                if stream is not None:
                    self._free.append(stream.close())

    def _begin(self, request: DecodeRequest) -> _Stream:
        return _Stream(self._free.pop() or self._start(), request, self._limits, self._start)

    def _start(self) -> _Process:
        process = _Process(self._limits)
        self._all = [each for each in self._all if not each.ended] + [process]
        return process


class _Stream:
    """The answers to one request, from as many processes as it takes."""

    def __init__(
        self,
        process: _Process,
        request: DecodeRequest,
        limits: DecodeLimits,
        start: Callable[[], _Process],
    ) -> None:
        self._process = process
        self._request = request
        self._limits = limits
        self._start = start
        self._whole = False
        process.ask(request)

    def pages(self) -> Iterator[Page | Failure]:
        """Pages and failures in order; a page that kills the process is a failure, too."""
        last = deaths = 0
        while True:
            try:
                for page in self._process.answers(self._request, self._limits.page_s):
                    last = page.page or last
                    yield page
                self._whole = True
                return
            except _LostError as lost:
                deaths += 1
                self._process.end()
                self._process = self._start()
                broken = self._page_behind(last)
                yield self._failure(lost, broken)
                if broken is None:
                    self._whole = True
                    return
                if deaths == _MAX_DEATHS:
                    yield from self._given_up(lost, broken)
                    self._whole = True
                    return
                last = broken
                self._request = replace(self._request, only=behind(self._request.only, broken))
                self._process.ask(self._request)

    def close(self) -> _Process | None:
        """The process for the next request; None if it still works on this one."""
        if self._whole:
            return self._process
        self._process.end()
        return None

    def _page_behind(self, last: int) -> int | None:
        """The page at which the process was lost; None where it opened the file in vain."""
        rest = behind(self._request.only, last)
        if isinstance(rest, frozenset):
            return min(rest, default=None)
        return last + 1 if last else None

    def _given_up(self, lost: _LostError, broken: int) -> Iterator[Failure]:
        """The wanted pages behind the last that is tried."""
        rest = behind(self._request.only, broken)
        numbers = sorted(rest) if isinstance(rest, frozenset) else [broken + 1]
        detail = f"given up with the pages that follow, after {_MAX_DEATHS} losses: {lost.detail}"
        for number in numbers:
            yield self._failure(_LostError(lost.reason, detail), number)

    def _failure(self, lost: _LostError, page: int | None) -> Failure:
        name = str(self._request.file.path)
        return Failure(name, page, Stage.DECODE, lost.reason, lost.detail, retryable=True)


class _Process:
    """One process, see `pipeline.pages.worker`."""

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

    def answers(self, request: DecodeRequest, page_s: float) -> Iterator[Page | Failure]:
        """What comes back for a request; raises _LostError."""
        if not self._started:
            self._line(_START_S)
            self._started = True
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
                raise _LostError(Reason.CRASHED, "the decoder went astray") from error
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
                raise _LostError(Reason.TIMED_OUT, f"decoding a page took more than {limit_s:g} s")
            heard = os.read(pipe.fileno(), 1 << 16)
            if not heard:
                raise _LostError(Reason.CRASHED, self._epitaph())
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
