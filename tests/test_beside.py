"""Stages that work in a thread beside the tower."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator

import pytest

from pipeline.encode.beside import beside


def counted(count: int, seen: list[int], closed: list[bool]) -> Generator[int, None, None]:
    try:
        for number in range(count):
            seen.append(number)
            yield number
    finally:
        closed.append(True)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "pages ahead"]


def test_items_come_in_order_and_the_thread_ends() -> None:
    seen: list[int] = []
    closed: list[bool] = []
    assert list(beside(counted(100, seen, closed))) == list(range(100))
    assert closed == [True] and not threads()


def test_the_thread_is_a_little_ahead_and_no_more() -> None:
    seen: list[int] = []
    items = beside(counted(100, seen, []), ahead=2)
    assert next(items) == 0
    until = time.monotonic() + 5
    while len(seen) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)
    assert seen == [0, 1, 2, 3]  # one is used, two wait, one waits for its place
    items.close()  # type: ignore[attr-defined]


def test_leaving_early_closes_the_stages_before() -> None:
    closed: list[bool] = []
    items = beside(counted(100, [], closed))
    next(items)
    items.close()  # type: ignore[attr-defined]
    assert closed == [True] and not threads()


def test_what_is_raised_comes_after_the_items_before_it() -> None:
    def failing() -> Generator[int, None, None]:
        yield 1
        yield 2
        raise OSError(28, "No space left on device")

    items = beside(failing())
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(OSError, match="No space left"):
        next(items)
    assert not threads()


def test_the_consumer_s_own_error_ends_the_thread() -> None:
    closed: list[bool] = []
    with pytest.raises(ZeroDivisionError):
        for number in beside(counted(100, [], closed)):
            1 / (number - 1)
    deadline = time.monotonic() + 5
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert closed == [True] and not threads()
