"""Let the stages before the tower work beside it: the tower does not wait for decode and resize."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")

PAGES_AHEAD = 2
_POLL_S = 0.1
_LEAVE_S = 5.0


@dataclass(frozen=True, slots=True)
class _End:
    """Nothing follows; or `error` came instead."""

    error: BaseException | None


def beside(items: Generator[Item, None, None], ahead: int = PAGES_AHEAD) -> Iterator[Item]:
    """The items in order, made by a thread that is at most `ahead` and one in work before us.

    What `items` raises is raised here. If no more are wanted, the thread closes `items` and ends;
    it is a daemon, so that a decoder that hangs does not keep the process.
    """
    made: queue.Queue[Item | _End] = queue.Queue(ahead)
    unwanted = threading.Event()
    maker = threading.Thread(
        target=_make, args=(items, made, unwanted), name="pages ahead", daemon=True
    )
    maker.start()
    try:
        while not isinstance(item := made.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        unwanted.set()
        maker.join(_LEAVE_S)


def _make(
    items: Generator[Item, None, None],
    made: queue.Queue[Item | _End],
    unwanted: threading.Event,
) -> None:
    error: BaseException | None = None
    try:
        for item in items:
            if not _offer(item, made, unwanted):
                break
    except BaseException as raised:  # the consumer's to handle
        error = raised
    finally:
        items.close()
        _offer(_End(error), made, unwanted)


def _offer(item: Item | _End, made: queue.Queue[Item | _End], unwanted: threading.Event) -> bool:
    """Wait for a place in the queue; False if nobody wants the item any more."""
    while not unwanted.is_set():
        try:
            made.put(item, timeout=_POLL_S)
            return True
        except queue.Full:
            continue
    return False
