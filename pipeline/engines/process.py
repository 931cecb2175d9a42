"""A child process in a group of its own, that dies with us and whose death we see at once."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from pipeline.engines import guard
from pipeline.engines.last_words import NOTES_ENV

GRACE_S = 20.0
_LAST_WORDS_BYTES = 4096


class EngineProcess:
    """`python -m MODULE ARGUMENTS…` as leader of its own process group.

    Standard output and error go to `log`, exceptions to `notes` beside it. `events` reads the
    descriptor that the child writes to. The write end of a pipe is held open here: when this
    process dies, however it dies, the child reads end-of-file and kills its group.
    """

    def __init__(
        self,
        module: str,
        arguments: list[str],
        environment: dict[str, str],
        *,
        log: Path,
        record: Path,
        events_variable: str,
    ) -> None:
        self.log, self._record = log, record
        self.notes = log.with_suffix(".deaths")
        liveness_read, self._liveness = os.pipe()
        events_read, events_write = os.pipe()
        environment = environment | {
            guard.LIVENESS_ENV: str(liveness_read),
            NOTES_ENV: str(self.notes),
            events_variable: str(events_write),
        }
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(liveness_read, events_write),
                start_new_session=True,
            )
        os.close(liveness_read)
        os.close(events_write)
        self.events: BinaryIO = os.fdopen(events_read, "rb")
        assert self._process.stdin is not None
        self.requests = self._process.stdin
        self.remember()

    def remember(self) -> None:
        """Write the group's process ids where the next run finds them."""
        guard.record_group(self._record, self._process.pid)

    def close_requests(self) -> None:
        """Tell the child that there are no more requests."""
        with contextlib.suppress(BrokenPipeError):
            self.requests.close()

    def wait(self, timeout_s: float) -> int | None:
        """Exit status, or None if the child is still there after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def last_words(self) -> str:
        """The last line of the log, for people; nothing is decided by it."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _LAST_WORDS_BYTES))
            lines = file.read().decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no word")

    def end(self) -> None:
        """No process of the group is left when this returns; may be called twice."""
        guard.kill_group(self._process.pid)
        self._process.wait()
        self.close_requests()
        self.events.close()
        if self._liveness >= 0:
            os.close(self._liveness)
            self._liveness = -1
        self._record.unlink(missing_ok=True)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
