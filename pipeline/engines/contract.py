"""The one contract of all drivers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.config import EngineOptions
from pipeline.jobs import Request, Result


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """An engine is up, its vision tower where it should be; one report per worker."""

    towers: tuple[dict[str, Any], ...]
    log: str


class Engine(Protocol):
    """An engine is a value with one method."""

    def run(self, requests: Iterator[Request | None]) -> Iterator[Result | EngineStarted]:
        """Yield one result per request, in the order in which they finish.

        Each time vLLM has come up an `EngineStarted` is yielded first.

        A `None` among the requests is a barrier: nothing after it is pulled before everything
        in front of it has finished. Memory is bounded whatever the number of requests.

        Raises EngineDeath, naming the unfinished requests, if the engine dies; a later call
        starts a new one.
        """
        ...

    def with_less_memory(self) -> Engine | None:
        """The same engine with the next smaller settings; None if there are none left."""
        ...

    def settings(self) -> EngineOptions:
        """What it is started with."""
        ...


class EngineDeath(Exception):
    """The engine died; `unfinished` were in its hands, results yielded before are good.

    `waiting` had been handed over, but not begun: none of them can be the cause.

    `ready` tells whether it had come up, so that a start that fails is told from a poison
    request, `out_of_memory` whether it asked for memory that is not there, `hopeless`
    whether another start would end the same way; `cause` is one line for people, `log` the file
    that holds the rest.
    """

    def __init__(
        self,
        cause: str,
        unfinished: tuple[Request, ...],
        *,
        ready: bool,
        log: str,
        waiting: tuple[Request, ...] = (),
        out_of_memory: bool = False,
        hopeless: bool = False,
    ) -> None:
        super().__init__(cause)
        self.cause, self.unfinished, self.ready, self.log = cause, unfinished, ready, log
        self.waiting = waiting
        self.out_of_memory, self.hopeless = out_of_memory, hopeless
