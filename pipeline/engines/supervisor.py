"""Keeps an engine alive: restarts it, and finds the request that kills it.

After a death the unfinished requests are suspects. They run again in halves, each half alone in
the engine; a half that kills it is halved again. A request that is alone at its second death is
set aside. Every finished result is kept. An engine that ran out of memory is started again with
less.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from pipeline.engines.contract import Engine, EngineDeath, EngineStarted
from pipeline.engines.memory import changed
from pipeline.errors import EngineLostError
from pipeline.jobs import Request, Result

MAX_DEATHS_OF_ONE_REQUEST = 2
MAX_FRUITLESS_STARTS = 3
MAX_STEPS_DOWN_WHILE_RUNNING = 2  # one request that is too large must not slow the whole night
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
    """The engine died; `unfinished` will run again when it is started again.

    `change` says with which other settings, where it ran out of memory.
    """

    cause: str
    log: str
    unfinished: tuple[Request, ...]
    change: str = ""


@dataclass(slots=True)
class _Feed:
    """Hands requests to the engine: suspects group by group, behind barriers, then the rest."""

    requests: Iterator[Request | None]
    stopping: Callable[[], bool]
    suspects: deque[list[Request]] = field(default_factory=deque)
    waiting: deque[Request] = field(default_factory=deque)

    def __iter__(self) -> Iterator[Request | None]:
        while self.suspects and not self.stopping():
            yield from self.suspects.popleft()
            yield None
        while self.waiting and not self.stopping():
            yield self.waiting.popleft()
        # no `yield from`: a death would close them with us
        for request in self.requests:  # noqa: UP028
            yield request

    def suspect(self, unfinished: list[Request]) -> None:
        middle = (len(unfinished) + 1) // 2
        halves = [unfinished[:middle], unfinished[middle:]]
        self.suspects.extendleft(half for half in reversed(halves) if half)


def supervise(
    engine: Engine,
    requests: Iterator[Request | None],
    *,
    sleep: Callable[[float], None] = time.sleep,
    stopping: Callable[[], bool] = lambda: False,
) -> Generator[Result | EngineStarted | SetAside | Death]:
    """Yield every result of `requests`, through as many lives of the engine as it takes.

    Once `stopping` says so, a dead engine is not started again, and what it left stays undone.
    Raises EngineLostError when it does not come up, or dies again and again without finishing
    or settling anything in between.
    """
    feed = _Feed(requests, stopping)
    deaths: Counter[str] = Counter()
    fruitless = steps_down = 0
    while True:
        try:
            for event in engine.run(iter(feed)):
                if isinstance(event, Result):
                    fruitless = 0
                yield event
            return
        except EngineDeath as death:
            fruitless += 1
            feed.waiting.extendleft(reversed(death.waiting))
            smaller = _smaller(engine, death, steps_down)
            change = "" if smaller is None else changed(engine.settings(), smaller.settings())
            yield Death(death.cause, death.log, death.unfinished, change)
            if stopping():
                return
            if smaller is not None:
                engine, steps_down = smaller, steps_down + death.ready
                fruitless -= not death.ready
            if fruitless > MAX_FRUITLESS_STARTS or (death.hopeless and not death.ready):
                raise _lost(death) from death
            if death.ready:
                aside = _settle(death, deaths, feed)
                if aside is not None:
                    fruitless = 0
                    yield aside
            else:
                feed.suspects.appendleft(list(death.unfinished))
            sleep(min(BACKOFF_S * 2 ** (fruitless - 1), 60.0) if fruitless else 0.0)


def _smaller(engine: Engine, death: EngineDeath, steps_down: int) -> Engine | None:
    """What to start next where memory was short, as long as there is something smaller."""
    if not death.out_of_memory or (death.ready and steps_down >= MAX_STEPS_DOWN_WHILE_RUNNING):
        return None
    return engine.with_less_memory()


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
