"""Decode in processes of their own: a crash, a hang or hunger for memory costs one document.

They work ahead: while one page is encoded, the next ones are decoded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Self, TypeVar

from pipeline.errors import Failure, Stage
from pipeline.pages.process import DecodingProcess, LostError
from pipeline.pages.records import Page, SourceFile, behind
from pipeline.pages.requests import DEFAULT_LIMITS, DecodeLimits, DecodeRequest

Item = TypeVar("Item")

_ITEMS_AHEAD = 16
_MAX_DEATHS = 3  # of the process, within one document


class Decoders:
    """Up to `processes` decoding processes, each started when it is first needed."""

    def __init__(self, processes: int = 1, limits: DecodeLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._free: list[DecodingProcess | None] = [None] * processes  # None: not started yet
        self._all: list[DecodingProcess] = []

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

    def page(self, request: DecodeRequest) -> Page | Failure:
        """The one page that is asked for."""
        ((_, pages),) = [(item, list(found)) for item, found in self.ahead([(None, request)])]
        return pages[0]

    def count(self, files: Iterable[SourceFile]) -> int:
        """How many pages files announce, none decoded; 1 for each where it can't be told."""
        total = 0
        for file in files:
            if not file.paged:
                total += 1
                continue
            process = self._free.pop() or self._start()
            counted = process.count(file, self._limits.page_s)
            self._free.append(None if counted is None else process)
            total += counted or 1
        return total

    def _begin(self, request: DecodeRequest) -> _Stream:
        return _Stream(self._free.pop() or self._start(), request, self._limits, self._start)

    def _start(self) -> DecodingProcess:
        process = DecodingProcess(self._limits)
        self._all = [each for each in self._all if not each.ended] + [process]
        return process


class _Stream:
    """The answers to one request, from as many processes as it takes."""

    def __init__(
        self,
        process: DecodingProcess,
        request: DecodeRequest,
        limits: DecodeLimits,
        start: Callable[[], DecodingProcess],
    ) -> None:
        self._process = process
        self._request = request
        self._limits = limits
        self._start = start
        self._whole = False
        process.ask(request)

    def pages(self) -> Iterator[Page | Failure]:
        """Pages and failures in order; a page that kills the process is a failure, too."""
        yield from self._answers()
        self._whole = True

    def _answers(self) -> Iterator[Page | Failure]:
        last = deaths = 0
        while True:
            try:
                for page in self._process.answers(self._request, self._limits.page_s):
                    last = page.page or last
                    yield page
                return
            except LostError as lost:
                deaths += 1
                self._process.end()
                self._process = self._start()
                broken = self._page_behind(last)
                yield self._failure(lost, broken)
                if broken is None:
                    return
                if deaths == _MAX_DEATHS:
                    yield from self._given_up(lost, broken)
                    return
                last = broken
                self._request = replace(self._request, only=behind(self._request.only, broken))
                self._process.ask(self._request)

    def close(self) -> DecodingProcess | None:
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

    def _given_up(self, lost: LostError, broken: int) -> Iterator[Failure]:
        """The wanted pages behind the last that is tried."""
        rest = behind(self._request.only, broken)
        numbers = sorted(rest) if isinstance(rest, frozenset) else [broken + 1]
        detail = f"given up with the pages that follow, after {_MAX_DEATHS} losses: {lost.detail}"
        for number in numbers:
            yield self._failure(LostError(lost.reason, detail), number)

    def _failure(self, lost: LostError, page: int | None) -> Failure:
        name = str(self._request.file.path)
        return Failure(name, page, Stage.DECODE, lost.reason, lost.detail, retryable=True)
