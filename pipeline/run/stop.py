"""Ctrl-C, SIGTERM and deadlines: stop feeding, let what is in flight finish, go on later."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Whether this run has been asked to stop, and by whom.

    While the engine works (`draining`), the first request to stop only sets `reason`; after
    `drain_s`, or at a second signal, KeyboardInterrupt ends what is still in flight. At other
    times KeyboardInterrupt comes at once. The time limit is measured by a clock that nobody sets.
    """

    def __init__(self, limit_s: float | None = None, *, drain_s: float = 60.0) -> None:
        self.reason = ""
        self._limit_s, self._drain_s = limit_s, drain_s
        self._draining = False

    def asked(self) -> bool:
        """True from the first request to stop on."""
        return bool(self.reason)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals and the time limit as requests to stop; in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (*_SIGNALS, signal.SIGALRM)}
        for number in before:
            if before[number] is not signal.SIG_IGN or number == signal.SIGALRM:  # nohup stays
                signal.signal(number, self._hear)
        if self._limit_s is not None:
            signal.setitimer(signal.ITIMER_REAL, max(self._limit_s, 0.001))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def draining(self) -> Iterator[None]:
        """Within this, what is in flight may finish."""
        self._draining = True
        try:
            yield
        finally:
            self._draining = False
            if self.reason:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        again = bool(self.reason)
        if not again:
            self.reason = "time" if number == signal.SIGALRM else "signal"
        if again or not self._draining:
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, self._drain_s)
        what = "time is up" if self.reason == "time" else "stopping"
        print(
            f"{what}: what is in flight has {self._drain_s:.0f} s to finish"
            + ("; once more to stop at once" if self.reason == "signal" else ""),
            file=sys.stderr,
        )
