"""A decoding process: requests come on stdin, pages leave through memory that both sides see.

stdin: `R` and a pickled `DecodeRequest`, `C` and a pickled `SourceFile` to count its pages, or `.`
for each page that was taken over. stdout: a JSON line at the start, then one per count, page,
failure and end of a request; JSON, since a hostile file may have taken this process over. A page's
pixels are written to the next of the file descriptors given, which are used in turn; when all hold
pages that were not taken yet, the process waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import resource
import signal
import sys
from typing import Any, BinaryIO

import numpy as np

from pipeline.errors import Failure
from pipeline.pages import Page, count_pages, decode_pages
from pipeline.pages.records import Pixels, SourceFile
from pipeline.pages.requests import DecodeRequest
from pipeline.parent import die_with_parent

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_HEAP_BYTES = 256 << 20
_BLOCK_BYTES = 32 << 20  # the most that glibc takes


class _Places:
    """Where pixels are put, in turn."""

    def __init__(self, descriptors: list[int], commands: BinaryIO) -> None:
        self._descriptors = descriptors
        self._commands = commands
        self._free = len(descriptors)
        self._next = 0

    def request(self) -> DecodeRequest | SourceFile | None:
        """The next request, or file to count; None at the end of all."""
        while (word := self._commands.read(1)) == b".":
            self._free += 1
        if not word:
            return None
        request: DecodeRequest | SourceFile = pickle.load(self._commands)  # our parent's
        return request

    def put(self, pixels: Pixels) -> int:
        """Write a page as soon as there is a place, and return its number."""
        while not self._free:
            if self._commands.read(1) != b".":
                raise SystemExit
            self._free += 1
        self._free -= 1
        place = self._next
        self._next = (place + 1) % len(self._descriptors)
        _write_all(self._descriptors[place], pixels)
        return place


def _write_all(descriptor: int, pixels: Pixels) -> None:
    rest = np.ascontiguousarray(pixels).data.cast("B")
    at = 0
    while rest:
        written = os.pwrite(descriptor, rest, at)
        at, rest = at + written, rest[written:]


def main(memory_bytes: int, descriptors: list[int]) -> None:
    """Serve requests until stdin ends."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    commands = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # decoders written in C print to them
        os.dup2(nowhere, descriptor)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    _keep_memory()
    places = _Places(descriptors, commands)
    _say(replies, {"started": True})
    while (request := places.request()) is not None:
        if isinstance(request, SourceFile):
            _say(replies, {"count": count_pages(request)})
        else:
            _serve(request, places, replies)


def _keep_memory() -> None:
    """Let glibc keep what pages are decoded in: to get it anew for each takes longer than decoding.

    Blocks of a page come from the heap, whose end is given back only above 256 MiB.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _BLOCK_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _HEAP_BYTES)


def _serve(request: DecodeRequest, places: _Places, replies: BinaryIO) -> None:
    for page in decode_pages(
        request.file, request.render, only=request.only, passwords=request.passwords
    ):
        _say(replies, _record(page, places))
    _say(replies, {"end": True})


def _record(page: Page | Failure, places: _Places) -> dict[str, Any]:
    if isinstance(page, Failure):
        return {"page": page.page, "failure": page.as_record()}
    height_px, width_px, _ = page.rgb.shape
    place = places.put(page.rgb)
    size = {"height_px": height_px, "width_px": width_px}
    return {"page": page.page, "place": place, "partial": page.partial, **size}


def _say(replies: BinaryIO, record: dict[str, Any]) -> None:
    replies.write(json.dumps(record).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(word) for word in sys.argv[2:]])
