"""Keeps an engine alive: restarts it, and finds the request that kills it.

After a death the unfinished requests are suspects. They run again in halves, each half alone in
the engine; a half that kills it is halved again. A request that is alone at its second death is
set aside. Every finished result is kept.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from pipeline.engines.contract import Engine, EngineDeath, EngineStarted
from pipeline.errors import EngineLostError
from pipeline.jobs import Request, Result

MAX_DEATHS_OF_ONE_REQUEST = 2
MAX_FRUITLESS_STARTS = 3
BACKOFF_S = 1.0


@dataclass(frozen=True, slots=True)
class SetAside:
    """A request that was alone in the engine when it died, more than once."""

    request: Request
    deaths: int
    cause: str
    log: str


@dataclass(frozen=True, slots=True)
class Death:
    """The engine died and is going to be started again; `unfinished` will run again."""

    cause: str
    log: str
    unfinished: tuple[Request, ...]


@dataclass(slots=True)
class _Feed:
    """Hands requests to the engine: suspects group by group, behind barriers, then the rest."""

    requests: Iterator[Request]
    suspects: deque[list[Request]] = field(default_factory=deque)

    def __iter__(self) -> Iterator[Request | None]:
        while self.suspects:
            yield from self.suspects.popleft()
            yield None
        yield from self.requests

    def suspect(self, unfinished: list[Request]) -> None:
        middle = (len(unfinished) + 1) // 2
        halves = [unfinished[:middle], unfinished[middle:]]
        self.suspects.extendleft(half for half in reversed(halves) if half)


def supervise(
    engine: Engine, requests: Iterator[Request], *, sleep: Callable[[float], None] = time.sleep
) -> Generator[Result | EngineStarted | SetAside | Death]:
    """Yield every result of `requests`, through as many lives of the engine as it takes.

    Raises EngineLostError when it does not come up, or dies again and again without finishing
    or settling anything in between.
    """
    feed = _Feed(requests)
    deaths: Counter[str] = Counter()
    fruitless = 0
    while True:
        try:
            for event in engine.run(iter(feed)):
                if isinstance(event, Result):
                    fruitless = 0
                yield event
            return
        except EngineDeath as death:
            fruitless += 1
            yield Death(death.cause, death.log, death.unfinished)
            if fruitless > MAX_FRUITLESS_STARTS:
                raise _lost(death) from death
            if death.ready:
                aside = _settle(death, deaths, feed)
                if aside is not None:
                    fruitless = 0
                    yield aside
            else:
                feed.suspects.appendleft(list(death.unfinished))
            sleep(min(BACKOFF_S * 2 ** (fruitless - 1), 60.0) if fruitless else 0.0)


def _settle(death: EngineDeath, deaths: Counter[str], feed: _Feed) -> SetAside | None:
    """Put the unfinished requests back, halved; or set the only one aside."""
    unfinished = list(death.unfinished)
    if len(unfinished) == 1:
        request = unfinished[0]
        deaths[request.custom_id] += 1
        if deaths[request.custom_id] >= MAX_DEATHS_OF_ONE_REQUEST:
            return SetAside(request, deaths[request.custom_id], death.cause, death.log)
    feed.suspect(unfinished)
    return None


def _lost(death: EngineDeath) -> EngineLostError:
    return EngineLostError(
        f"the engine can't be {'kept alive' if death.ready else 'started'}: {death.cause}",
        f"its last words are in `{death.log}`; finished answers are kept, "
        "run the same command again to go on",
    )
