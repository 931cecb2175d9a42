"""Drive pending requests through an engine and keep what becomes of each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from pipeline.engines.contract import Engine, EngineStarted
from pipeline.engines.supervisor import Death, SetAside, supervise
from pipeline.errors import Failure
from pipeline.jobs import Request, Result
from pipeline.journal import RunDirectory
from pipeline.run.outcome import DamagedEntry, outcome_of, set_aside_failure
from pipeline.run.requests import RequestMaker


@dataclass(slots=True)
class Tally:
    """Counts of the run so far; failures by custom_id, or by their text where there is none."""

    total: int
    succeeded: int = 0
    reused: int = 0
    engine_starts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failures: dict[str, Failure] = field(default_factory=dict)
    stopped: bool = False

    def fail(self, failure: Failure) -> None:
        self.failures[failure.custom_id or failure.detail] = failure


def answer(
    engine: Engine,
    maker: RequestMaker,
    pending: set[str],
    directory: RunDirectory,
    tally: Tally,
    quiet: bool,
) -> list[DamagedEntry]:
    """Drive the pending requests through the engine and keep what becomes of each.

    Returns the cache entries that the engine refused; their requests are still pending.
    """
    handed: dict[str, Request] = {}
    damaged: list[DamagedEntry] = []
    total, revision = tally.total, maker.pages.target.model.revision
    requests = _hand_out(maker, pending, directory, handed)
    off = quiet or None  # None: shown on a terminal only
    if pending and not quiet:
        tqdm.write(
            f"starting vLLM, which takes a minute; its log goes to {directory.attempts}/",
            file=sys.stderr,
        )
    with (
        tqdm(total=total, initial=total - len(pending), unit="request", disable=off) as bar,
        closing(supervise(engine, requests)) as events,
    ):
        for event in events:
            if isinstance(event, EngineStarted):
                tally.engine_starts += 1
                bar.unpause()  # the start is no part of the requests' rate
                directory.note_engine("engine_start", towers=event.towers, log=event.log)
                if not quiet:
                    _say_tower(event)
            elif isinstance(event, Death):
                _note_death(event, directory)
            else:
                bad = _keep(event, handed, directory, tally, revision)
                damaged += [bad] if bad else []
                bar.update()
    return damaged


def _hand_out(
    maker: RequestMaker, pending: set[str], directory: RunDirectory, handed: dict[str, Request]
) -> Iterator[Request]:
    for request in maker.requests():
        if isinstance(request, Request) and request.custom_id in pending:
            handed[request.custom_id] = request
            _note_start(request, directory)
            yield request


def _note_start(request: Request, directory: RunDirectory) -> None:
    attempt = directory.attempts_of(request.custom_id, request.identity) + 1
    directory.note("started", request.custom_id, request.identity, attempt)


def _note_death(death: Death, directory: RunDirectory) -> None:
    tqdm.write(
        f"engine died: {death.cause} (log `{death.log}`); "
        f"{len(death.unfinished)} unfinished requests run again",
        file=sys.stderr,
    )
    directory.note_engine("engine_death", cause=death.cause, log=death.log)
    for request in death.unfinished:
        _note_start(request, directory)


def _keep(
    event: Result | SetAside,
    handed: dict[str, Request],
    directory: RunDirectory,
    tally: Tally,
    revision: str | None,
) -> DamagedEntry | None:
    """Make one finished request durable."""
    custom_id = event.request.custom_id if isinstance(event, SetAside) else event.custom_id
    request = handed.pop(custom_id)
    attempts = directory.attempts_of(custom_id, request.identity)
    if isinstance(event, SetAside):
        outcome: dict[str, Any] | Failure | DamagedEntry = set_aside_failure(event, attempts)
    else:
        outcome = outcome_of(event, request, attempts, revision)
    if isinstance(outcome, Failure):
        tally.fail(outcome)
        directory.fail(outcome, request.identity)
    elif isinstance(outcome, DamagedEntry):
        return outcome
    else:
        directory.finish(outcome)
        tally.succeeded += 1
        usage = outcome["response"]["body"].get("usage") or {}
        tally.prompt_tokens += usage.get("prompt_tokens") or 0
        tally.completion_tokens += usage.get("completion_tokens") or 0
    return None


def _say_tower(started: EngineStarted) -> None:
    tower = started.towers[0]
    tqdm.write(
        f"engine ready, vision tower not loaded ({tower['class']}, "
        f"{tower['parameters']} parameters)",
        file=sys.stderr,
    )
