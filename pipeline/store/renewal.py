"""Last uses noted in an object store, a request or two each: by threads that nobody waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_THREADS = 8
_WAITING = 256


class Renewals:
    """Calls `renew(name)` soon; a process that ends does what is left of at most 256."""

    def __init__(self, renew: Callable[[str], object]) -> None:
        self._renew = renew
        self._pool: ThreadPoolExecutor | None = None
        self._room = threading.Semaphore(_WAITING)
        self._start = threading.Lock()
        self._impossible = False

    def add(self, name: str) -> None:
        """Note a use of the file; waits only where too many are waiting already."""
        if self._impossible:
            return
        with self._start:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, "last use")
        self._room.acquire()
        self._pool.submit(self._do, name)

    def _do(self, name: str) -> None:
        try:
            if not self._impossible:
                self._renew(name)
        except FileNotFoundError:
            pass
        except Exception:  # a cache that can only be read keeps its times
            self._impossible = True
        finally:
            self._room.release()

    def finish(self) -> None:
        """Wait until all uses so far are noted."""
        with self._start:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
