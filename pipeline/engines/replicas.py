"""Several engines fed from one queue; one that can't be kept alive does not stop the others.

Each engine is supervised in a thread of its own, which asks for requests and hands over events;
everything else, and with it the order of the journal, stays in the calling thread.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.engines.contract import Engine, EngineStarted
from pipeline.engines.guard import CORES_ENV
from pipeline.engines.supervisor import Death, SetAside, supervise
from pipeline.jobs import Request, Result

Event = Result | EngineStarted | SetAside | Death
_WANT, _END = object(), object()


def supervise_all(
    engines: Sequence[Engine],
    requests: Iterator[Request | None],
    *,
    stopping: Callable[[], bool] = lambda: False,
    end_at_once: Callable[[], object] = lambda: None,
) -> Generator[Event]:
    """`supervise` for all engines at once; a barrier holds for all of them.

    `end_at_once` kills them, for the case that the caller leaves early. Raises EngineLostError
    when the last engine is lost; what a lost one had in its hands goes to the others.
    """
    if len(engines) == 1:
        yield from supervise(engines[0], requests, stopping=stopping)
        return
    desk = _Desk(requests)
    leaving = threading.Event()
    replicas = [_Replica(number, desk.mail) for number in range(len(engines))]
    threads = [
        threading.Thread(
            target=replica.work,
            args=(engine, lambda: leaving.is_set() or stopping()),
            name=f"replica {replica.number}",
            daemon=True,
        )
        for engine, replica in zip(engines, replicas, strict=True)
    ]
    try:
        for thread in threads:
            thread.start()
        yield from desk.serve(replicas)
    finally:
        leaving.set()
        end_at_once()
        for replica in replicas:
            replica.answers.put(_END)
        for thread in threads:
            thread.join(30)


@dataclass(slots=True)
class _Replica:
    """One engine's thread, as the desk sees it."""

    number: int
    mail: queue.SimpleQueue[tuple[_Replica, Any]]
    answers: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    flying: dict[str, Request] = field(default_factory=dict)

    def work(self, engine: Engine, stopping: Callable[[], bool]) -> None:
        """In the thread: supervise the engine, and say how it ended."""
        try:
            for event in supervise(engine, self._requests(), stopping=stopping):
                self.mail.put((self, event))
            self.mail.put((self, _END))
        except BaseException as error:  # raised again in the calling thread
            self.mail.put((self, error))

    def _requests(self) -> Iterator[Request | None]:
        while True:
            self.mail.put((self, _WANT))
            answer = self.answers.get()
            if answer is _END:
                return
            yield answer


class _Desk:
    """Hands requests to the replicas that want some, and passes their events on."""

    def __init__(self, requests: Iterator[Request | None]) -> None:
        self.mail: queue.SimpleQueue[tuple[_Replica, Any]] = queue.SimpleQueue()
        self._requests = requests
        self._returned: deque[Request] = deque()  # from engines that were lost
        self._waiting: list[_Replica] = []  # want a request, and have nothing else to do
        self._barrier = self._exhausted = False

    def serve(self, replicas: Sequence[_Replica]) -> Iterator[Event]:
        working = list(replicas)
        while working:
            replica, message = self.mail.get()
            if message is _WANT:
                self._give(replica)
            elif message is _END or isinstance(message, BaseException):
                working.remove(replica)
                self._returned.extend(replica.flying.values())
                replica.flying.clear()
                if isinstance(message, BaseException) and not working:
                    raise message
            else:
                yield message
                self._landed(replica, message)
            self._go_on(working)

    def _give(self, replica: _Replica) -> None:
        request = self._next()
        if request is not None:
            replica.flying[request.custom_id] = request
            replica.answers.put(request)
        elif replica.flying:
            replica.answers.put(None)  # it has to finish those before it can wait
        else:
            self._waiting.append(replica)

    def _next(self) -> Request | None:
        """The next request; None at a barrier and at the end."""
        if self._returned:
            return self._returned.popleft()
        if self._barrier or self._exhausted:
            return None
        try:
            request = next(self._requests)
        except StopIteration:
            self._exhausted = True
            return None
        self._barrier = request is None
        return request

    def _landed(self, replica: _Replica, event: Event) -> None:
        if isinstance(event, Result):
            replica.flying.pop(event.custom_id, None)
        elif isinstance(event, SetAside):
            replica.flying.pop(event.request.custom_id, None)

    def _go_on(self, working: Sequence[_Replica]) -> None:
        """Serve those that wait, once there is something, or nothing will come any more."""
        if self._returned and self._waiting:
            self._serve_waiting()
        while self._waiting and not any(replica.flying for replica in working):
            if self._exhausted and not self._returned:
                for replica in self._waiting:
                    replica.answers.put(_END)
                self._waiting.clear()
                return
            self._barrier = False
            self._serve_waiting()

    def _serve_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for replica in waiting:
            self._give(replica)


def share_of(number: int, replicas: int, gpus_each: int, *, cpu: bool) -> dict[str, str]:
    """The environment that gives replica `number` its GPUs, or its cores where vLLM is on CPU."""
    if replicas == 1:
        return {}
    if cpu:
        cores = sorted(os.sched_getaffinity(0))[number::replicas] or sorted(os.sched_getaffinity(0))
        return {CORES_ENV: ",".join(map(str, cores))}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = number * gpus_each
    if visible is None:
        devices = [str(device) for device in range(first, first + gpus_each)]
    else:
        devices = visible.split(",")[first : first + gpus_each]
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
