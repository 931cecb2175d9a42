"""Drive pending requests through an engine and keep what becomes of each."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from pipeline.engines.contract import Engine, EngineStarted
from pipeline.engines.replicas import supervise_all
from pipeline.engines.supervisor import Death, SetAside
from pipeline.errors import Failure
from pipeline.jobs import Request, Result
from pipeline.journal import RunDirectory
from pipeline.run.ladder import Climb, Ladder
from pipeline.run.outcome import DamagedEntry, outcome_of, set_aside_failure
from pipeline.run.requests import RequestMaker
from pipeline.run.stop import Stop


@dataclass(slots=True)
class Tally:
    """Counts of the run so far; failures by custom_id, or by their text where there is none.

    `flags` counts what stands against answers, reused ones included; `retried` the answers that
    were asked for again.
    """

    total: int
    succeeded: int = 0
    reused: int = 0
    retried: int = 0
    engine_starts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failures: dict[str, Failure] = field(default_factory=dict)
    flags: Counter[str] = field(default_factory=Counter)
    stopped: bool = False

    def fail(self, failure: Failure) -> None:
        self.failures[failure.custom_id or failure.detail] = failure

    @property
    def left(self) -> int:
        """Requests that are neither answered nor failed."""
        return self.total - self.succeeded - self.reused - len(self.failures)


@dataclass(frozen=True, slots=True)
class Persistence:
    """How often an engine is asked: `max_attempts` after errors that may pass."""

    ladder: Ladder = field(default_factory=Ladder)
    max_attempts: int = 3


@dataclass(slots=True)
class Answering:
    """One pass of pending requests through an engine.

    `pending` maps custom_ids to identities, and loses each one that is settled.
    """

    maker: RequestMaker
    pending: dict[str, str]
    directory: RunDirectory
    tally: Tally
    persistence: Persistence
    stop: Stop
    handed: dict[str, Request] = field(default_factory=dict)
    again: deque[Request] = field(default_factory=deque)
    climbs: dict[str, Climb] = field(default_factory=dict)

    def requests(self) -> Iterator[Request | None]:
        """Pending requests, and in between those that are asked again."""
        for request in self.maker.requests():
            if isinstance(request, Request) and request.custom_id in self.pending:
                yield from self._asked_again()
                if self.stop.asked():
                    return
                yield self._hand_out(request)
        while not self.stop.asked():
            yield from self._asked_again()
            yield None  # until all are back there may be some to ask again
            if not self.again:
                return

    def _asked_again(self) -> Iterator[Request]:
        while self.again and not self.stop.asked():
            yield self._hand_out(self.again.popleft())

    def _hand_out(self, request: Request) -> Request:
        self.handed[request.custom_id] = request
        self.note_start(request)
        return request

    def note_start(self, request: Request) -> None:
        attempt = self.directory.attempts_of(request.custom_id, request.identity) + 1
        self.directory.note("started", request.custom_id, request.identity, attempt)

    def settle(self, event: Result | SetAside) -> DamagedEntry | None:
        """Keep one answer or failure, or ask again; a refused cache entry is the caller's."""
        custom_id = event.request.custom_id if isinstance(event, SetAside) else event.custom_id
        request = self.handed.pop(custom_id)
        attempts = self.directory.attempts_of(custom_id, request.identity)
        if isinstance(event, SetAside):
            self._failed(request, set_aside_failure(event, attempts))
            return None
        revision = self.maker.pages.target.model.revision
        outcome = outcome_of(event, request, attempts, revision)
        if isinstance(outcome, DamagedEntry):
            return outcome
        if not isinstance(outcome, Failure):
            self._answered(request, outcome)
        elif self._may_pass(outcome):
            self.again.append(request)
        else:
            self._failed(request, outcome)
        return None

    def _may_pass(self, failure: Failure) -> bool:
        tried_less = failure.attempts < self.persistence.max_attempts
        return failure.retryable and tried_less and not self.stop.asked()

    def _answered(self, request: Request, record: dict[str, Any]) -> None:
        climb = self.climbs.setdefault(request.custom_id, Climb(request.body))
        climb.add(record)
        changes = climb.next_changes(self.persistence.ladder)
        if changes is None:
            self._finish(request, climb.best())
            return
        self.directory.keep_try(record)
        if not self.stop.asked():  # stopped, it stays pending
            climb.changes = changes
            self.tally.retried += 1
            self.again.append(replace(request, body={**climb.asked, **changes}))

    def _failed(self, request: Request, failure: Failure) -> None:
        climb = self.climbs.get(request.custom_id)
        if climb is not None and climb.tries:  # asked again only to better an answer
            self._finish(request, climb.best())
            return
        self.tally.fail(failure)
        self.directory.fail(failure, request.identity)
        del self.pending[request.custom_id]

    def _finish(self, request: Request, record: dict[str, Any]) -> None:
        self.directory.finish(record)
        del self.pending[request.custom_id]
        self.climbs.pop(request.custom_id, None)
        self.tally.succeeded += 1
        self.tally.flags.update(record["pipeline"]["flags"])
        usage = record["response"]["body"].get("usage") or {}
        self.tally.prompt_tokens += usage.get("prompt_tokens") or 0
        self.tally.completion_tokens += usage.get("completion_tokens") or 0


def answer(
    engines: Sequence[Engine],
    answering: Answering,
    quiet: bool,
    end_at_once: Callable[[], object] = lambda: None,
) -> list[DamagedEntry]:
    """Drive the pending requests through the engines and keep what becomes of each.

    Returns the cache entries that the engine refused; their requests are still pending.
    """
    damaged: list[DamagedEntry] = []
    tally, directory, stop = answering.tally, answering.directory, answering.stop
    off = quiet or None  # None: shown on a terminal only
    if answering.pending and not quiet:
        tqdm.write(
            f"starting vLLM, which takes a minute; its log goes to {directory.attempts}/",
            file=sys.stderr,
        )
    done = tally.total - len(answering.pending)
    with (
        stop.draining(),
        tqdm(total=tally.total, initial=done, unit="request", disable=off) as bar,
        closing(
            supervise_all(
                engines, answering.requests(), stopping=stop.asked, end_at_once=end_at_once
            )
        ) as events,
    ):
        for event in events:
            if isinstance(event, EngineStarted):
                tally.engine_starts += 1
                bar.unpause()  # the start is no part of the requests' rate
                directory.note_engine("engine_start", towers=event.towers, log=event.log)
                if not quiet:
                    _say_tower(event)
            elif isinstance(event, Death):
                _note_death(event, answering)
            else:
                bad = answering.settle(event)
                damaged += [bad] if bad else []
                bar.update(tally.total - len(answering.pending) - bar.n)
    return damaged


def _note_death(death: Death, answering: Answering) -> None:
    again = f"; next with {death.change}" if death.change else ""
    tqdm.write(
        f"engine died: {death.cause} (log `{death.log}`); "
        f"{len(death.unfinished)} requests unfinished{again}",
        file=sys.stderr,
    )
    answering.directory.note_engine(
        "engine_death", cause=death.cause, log=death.log, change=death.change
    )
    for request in death.unfinished:
        answering.note_start(request)


def _say_tower(started: EngineStarted) -> None:
    tower = started.towers[0]
    tqdm.write(
        f"engine ready, vision tower not loaded ({tower['class']}, "
        f"{tower['parameters']} parameters)",
        file=sys.stderr,
    )
