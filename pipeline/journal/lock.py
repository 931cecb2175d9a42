"""One run per job: a flock, which dies with its process, and a line about who holds it."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from io import FileIO
from pathlib import Path

from pipeline.errors import LockedError

_LOOK_AGAIN_S = 0.5


def take(lock: FileIO, path: Path, wait_s: float = 0.0) -> None:
    """Lock the open file, waiting up to `wait_s` for its holder, and write down who has it now.

    Raises LockedError, naming the holder of the run directory `path`.
    """
    end_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if time.monotonic() >= end_s:
                raise _locked(lock, path) from error
            time.sleep(min(_LOOK_AGAIN_S, max(0.0, end_s - time.monotonic())))
    lock.truncate(0)
    since = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    lock.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode())


def _locked(lock: FileIO, path: Path) -> LockedError:
    lock.seek(0)
    holder = lock.read().decode(errors="replace").strip() or "another process"
    return LockedError(
        f"`{path}` is in use by {holder}",
        "wait for that run to end, with `--wait SECONDS` for one; "
        "a dead process never holds the lock",
    )
