"""The run directory `JOB.run/`: lock, journal, results, errors.

`journal.jsonl` is the only truth about what happened. Order of writes for an answer: its line in
`results.jsonl`, fsync, then its `done` event in the journal, fsync. A crash between the two
leaves a whole result line without its event; it is recognised by its identity at the next start,
so a finished answer is never lost and never run twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.durable import sync
from pipeline.errors import Failure
from pipeline.journal.lines import (
    as_line,
    complete_lines,
    end_torn_line,
    ends_with_newline,
    whole_results,
    write_atomically,
    writing,
)
from pipeline.journal.lock import take


@dataclass(frozen=True, slots=True)
class ItemState:
    """What the journal says of one custom_id: its last identity, whether done, tries so far.

    `failure` is the record of the failure that it ended in, if it did; `flags` are those of the
    answer.
    """

    identity: str
    done: bool
    attempts: int
    failure: dict[str, Any] | None = None
    flags: tuple[str, ...] = ()


class RunDirectory:
    """An open, locked run directory; made by `open_run_directory`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.attempts = path / "attempts"
        self.attachments = path / "attachments"
        self.attempts.mkdir(parents=True, exist_ok=True)
        self.states: dict[str, ItemState] = {}
        end_torn_line(path / "journal.jsonl")
        self._read_journal()
        self._recover_results()
        self._journal = (path / "journal.jsonl").open("ab")
        self._results = (path / "results.jsonl").open("ab")

    def close(self) -> None:
        with writing(self.path), self._results, self._journal:
            pass

    # -- reading --------------------------------------------------------------------------------

    def _read_journal(self) -> None:
        for event in complete_lines(self.path / "journal.jsonl"):
            match event:
                case {
                    "event": str(name),
                    "custom_id": str(custom_id),
                    "identity": str(identity),
                    "attempt": int(attempt),
                }:
                    failure = event if name == "failed" else None
                    self._apply(name, custom_id, identity, attempt, failure)

    def _apply(
        self,
        event: str,
        custom_id: str,
        identity: str,
        attempt: int,
        failure: dict[str, Any] | None = None,
    ) -> None:
        state = self.states.get(custom_id)
        if event == "done":
            self.states[custom_id] = ItemState(identity, True, attempt)
        elif state is None or state.identity != identity:
            self.states[custom_id] = ItemState(identity, False, attempt, failure)
        elif not state.done:
            attempts = max(state.attempts, attempt)
            self.states[custom_id] = replace(state, attempts=attempts, failure=failure)

    def _recover_results(self) -> None:
        """Bring results.jsonl and the journal into agreement after a crash."""
        path = self.path / "results.jsonl"
        kept: dict[str, bytes] = {}
        flags: dict[str, tuple[str, ...]] = {}
        superseded: list[bytes] = []
        unjournalled: list[tuple[str, str, int]] = []
        total = 0
        for raw, record in whole_results(path):
            total += 1
            custom_id, pipeline = record["custom_id"], record["pipeline"]
            state = self.states.get(custom_id)
            if state is None or state.identity == pipeline["identity"]:
                flags[custom_id] = _flags(pipeline)
                if custom_id not in kept and not (state and state.done):
                    unjournalled.append((custom_id, pipeline["identity"], pipeline["attempts"]))
                kept[custom_id] = raw
            else:
                superseded.append(raw)
        if unjournalled:
            with (self.path / "journal.jsonl").open("ab") as journal:
                for custom_id, identity, attempt in unjournalled:
                    journal.write(_event_line("done", custom_id, identity, attempt))
                    self._apply("done", custom_id, identity, attempt)
                sync(journal)
        self._forget_results_that_are_gone(kept)
        for custom_id, found in flags.items():
            self.states[custom_id] = replace(self.states[custom_id], flags=found)
        clean = path.exists() and total == len(kept) and ends_with_newline(path)
        if path.exists() and not clean:
            self._set_aside(superseded)
            write_atomically(path, kept.values())

    def _forget_results_that_are_gone(self, kept: dict[str, bytes]) -> None:
        for custom_id, state in self.states.items():
            if state.done and custom_id not in kept:
                self.states[custom_id] = replace(state, done=False)

    def _set_aside(self, lines: list[bytes]) -> None:
        path = self.attempts / "superseded.jsonl"
        if lines:
            with writing(path), path.open("ab") as file:
                file.writelines(lines)
                sync(file)

    def is_done(self, custom_id: str, identity: str) -> bool:
        """True if results.jsonl holds the answer to this very request."""
        state = self.states.get(custom_id)
        return state is not None and state.done and state.identity == identity

    def attempts_of(self, custom_id: str, identity: str) -> int:
        """How often this very request has been handed to an engine."""
        state = self.states.get(custom_id)
        return state.attempts if state is not None and state.identity == identity else 0

    # -- writing --------------------------------------------------------------------------------

    def supersede(self, identities: dict[str, str]) -> None:
        """Move answers whose request has changed out of results.jsonl.

        `identities` maps each custom_id of the job to its identity now; answers of custom_ids
        that the job no longer names stay.
        """
        stale = {
            custom_id
            for custom_id, identity in identities.items()
            if (state := self.states.get(custom_id)) and state.done and state.identity != identity
        }
        self.set_aside(stale)

    def set_aside(self, stale: set[str]) -> None:
        """Move the answers of these custom_ids out of results.jsonl: they will be asked again."""
        if not stale:
            return
        path = self.path / "results.jsonl"
        kept: list[bytes] = []
        superseded: list[bytes] = []
        for raw, record in whole_results(path):
            (superseded if record["custom_id"] in stale else kept).append(raw)
        self._set_aside(superseded)
        self._results.close()
        write_atomically(path, kept)
        self._results = path.open("ab")
        for custom_id in stale:
            self.states[custom_id] = replace(self.states[custom_id], done=False, flags=())

    def note(self, event: str, custom_id: str, identity: str, attempt: int) -> None:
        """Append an event without waiting for the disk (queued, started)."""
        self._write(_event_line(event, custom_id, identity, attempt))
        self._apply(event, custom_id, identity, attempt)

    def note_engine(self, event: str, **fields: Any) -> None:
        """Append an event of the engine itself (engine_start, engine_death)."""
        self._append(self._journal, as_line({"event": event, "time": _now(), **fields}))

    def finish(self, record: dict[str, Any]) -> None:
        """Keep an answer: result line, fsync, then the `done` event, fsync."""
        pipeline = record["pipeline"]
        self._append(self._results, as_line(record))
        self._append(
            self._journal,
            _event_line("done", record["custom_id"], pipeline["identity"], pipeline["attempts"]),
        )
        self._apply("done", record["custom_id"], pipeline["identity"], pipeline["attempts"])
        state = self.states[record["custom_id"]]
        self.states[record["custom_id"]] = replace(state, flags=_flags(pipeline))

    def keep_try(self, record: dict[str, Any]) -> None:
        """Keep an answer that is asked for again in `attempts/answers.jsonl`, for people."""
        path = self.attempts / "answers.jsonl"
        with writing(path), path.open("ab") as file:
            file.write(as_line(record))

    def failure_of(self, custom_id: str, identity: str) -> dict[str, Any] | None:
        """The failure that this very request ended in, as it stands in the journal."""
        state = self.states.get(custom_id)
        return state.failure if state is not None and state.identity == identity else None

    def flags_of(self, custom_id: str) -> tuple[str, ...]:
        """What stands against an answer that is done."""
        state = self.states.get(custom_id)
        return () if state is None else state.flags

    def fail(self, failure: Failure, identity: str | None) -> None:
        """Keep the reason why an item failed; `identity` is None before it has become a request.

        The latter is found again at every start, so it does not wait for the disk.
        """
        event = {
            "event": "failed",
            "time": _now(),
            **failure.as_record(),
            "identity": identity,
            "attempt": failure.attempts,
        }
        if identity is None:
            self._write(as_line(event))
        else:
            self._append(self._journal, as_line(event))
            assert failure.custom_id is not None
            self._apply("failed", failure.custom_id, identity, failure.attempts, event)

    def write_errors(self, failures: Iterable[Failure]) -> None:
        """Replace errors.jsonl by the items that are failed now."""
        write_atomically(
            self.path / "errors.jsonl", (as_line(failure.as_record()) for failure in failures)
        )

    def write_report(self, report: dict[str, Any]) -> None:
        """Replace report.json, the totals of the last run."""
        write_atomically(self.path / "report.json", [as_line(report)])

    def flush(self) -> None:
        """Wait until every event noted so far is on disk."""
        with writing(self.path / "journal.jsonl"):
            sync(self._journal)

    def _write(self, line: bytes) -> None:
        with writing(self.path / "journal.jsonl"):
            self._journal.write(line)

    def _append(self, file: BinaryIO, line: bytes) -> None:
        with writing(Path(file.name)):
            file.write(line)
            sync(file)


@contextmanager
def open_run_directory(path: Path, wait_s: float = 0.0) -> Iterator[RunDirectory]:
    """Lock and open the run directory of a job, making it if needed.

    Raises LockedError, naming the holder, if another live process has it for `wait_s` more.
    """
    with ExitStack() as stack:
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((path / "lock").open("a+b", buffering=0))
            take(lock, path, wait_s)
            directory = RunDirectory(path)
        stack.callback(directory.close)
        yield directory


def _flags(pipeline: dict[str, Any]) -> tuple[str, ...]:
    flags = pipeline.get("flags")
    return tuple(str(flag) for flag in flags) if isinstance(flags, list) else ()


def _event_line(event: str, custom_id: str, identity: str, attempt: int) -> bytes:
    return as_line(
        {
            "event": event,
            "time": _now(),
            "custom_id": custom_id,
            "identity": identity,
            "attempt": attempt,
        }
    )


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
