"""Several engines, one queue: every request answered once, whichever of them die."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import cast

import pytest

from pipeline.engines.contract import Engine, EngineDeath
from pipeline.engines.replicas import share_of, supervise_all
from pipeline.engines.supervisor import SetAside
from pipeline.errors import EngineLostError
from pipeline.jobs import Request, Result


def request(name: str) -> Request:
    return Request(name, "/v1/chat/completions", {}, f"identity {name}", (), (), 1)


class Window:
    """Runs two requests at once, each for `seconds`; `poison` kills it, `starts` may fail."""

    def __init__(self, seconds: float = 0.0, poison: str = "", broken: bool = False) -> None:
        self.seconds, self.poison, self.broken = seconds, poison, broken
        self.done: list[str] = []

    def run(self, requests: Iterator[Request | None]) -> Iterator[Result]:
        flying: list[Request] = []
        for item in requests:
            if item is not None:
                flying.append(item)
                if self.broken:
                    raise EngineDeath("no start", tuple(flying), ready=False, log="log")
                if item.custom_id == self.poison:
                    raise EngineDeath("poison", tuple(flying), ready=True, log="log")
            while flying and (item is None or len(flying) >= 2):
                yield self._answer(flying.pop(0))
        for last in flying:
            yield self._answer(last)

    def _answer(self, request: Request) -> Result:
        time.sleep(self.seconds)
        self.done.append(request.custom_id)
        return Result(request.custom_id, 200, "", {}, None)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.engines.supervisor.BACKOFF_S", 0.0)


def drive(engines: list[Window], requests: Iterator[Request | None]) -> tuple[list[str], list[str]]:
    """custom_ids answered, and set aside."""
    events = list(supervise_all(cast(list[Engine], engines), requests))
    answered = [event.custom_id for event in events if isinstance(event, Result)]
    return answered, [event.request.custom_id for event in events if isinstance(event, SetAside)]


NAMES = [f"r{number}" for number in range(40)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_request_is_answered_once(count: int) -> None:
    engines = [Window(0.001) for _ in range(count)]
    answered, aside = drive(engines, map(request, NAMES))
    assert sorted(answered) == sorted(NAMES) and aside == []
    assert all(engine.done for engine in engines), "each has its share"


def test_the_faster_one_does_more() -> None:
    slow, fast = Window(0.03), Window(0.001)
    drive([slow, fast], map(request, NAMES))
    assert len(fast.done) > len(slow.done)


def test_one_that_never_starts_does_not_stop_the_others() -> None:
    good = Window()
    answered, _ = drive([Window(broken=True), good], map(request, NAMES))
    assert sorted(answered) == sorted(NAMES) and len(good.done) == len(NAMES)


def test_when_all_are_lost_so_is_the_run() -> None:
    with pytest.raises(EngineLostError, match="no start"):
        drive([Window(broken=True), Window(broken=True)], map(request, NAMES))


def test_poison_is_set_aside_once() -> None:
    answered, aside = drive([Window(poison="r7"), Window(poison="r7")], map(request, NAMES))
    assert aside == ["r7"] and sorted(answered) == sorted(set(NAMES) - {"r7"})


def test_what_is_asked_again_after_a_barrier_comes_after_all_answers() -> None:
    """As `Answering.requests` does: what to ask again is known when every answer is back."""
    seen: Counter[str] = Counter()
    again: list[str] = []

    def asked() -> Iterator[Request | None]:
        yield from map(request, NAMES)
        yield None
        assert sum(seen.values()) == len(NAMES), "the barrier holds for all engines"
        yield from map(request, again)
        yield None

    engines = [Window(0.001), Window(0.004)]
    for event in supervise_all(cast(list[Engine], engines), asked()):
        assert isinstance(event, Result)
        seen[event.custom_id] += 1
        if event.custom_id in ("r3", "r30") and seen[event.custom_id] == 1:
            again.append(event.custom_id)
    assert seen == Counter(NAMES) + Counter(["r3", "r30"])


def test_a_caller_that_leaves_early_ends_the_engines() -> None:
    ended = threading.Event()
    events = supervise_all(
        cast(list[Engine], [Window(0.01), Window(0.01)]),
        map(request, NAMES),
        end_at_once=ended.set,
    )
    next(events)
    events.close()
    assert ended.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica")]


def test_each_replica_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    name = "CUDA_VISIBLE_DEVICES"
    assert share_of(0, 1, 2, cpu=False) == {}
    assert [share_of(n, 2, 2, cpu=False)[name] for n in (0, 1)] == ["0,1", "2,3"]
    monkeypatch.setenv(name, "4,5,6")
    assert [share_of(n, 3, 1, cpu=False)[name] for n in (0, 1, 2)] == ["4", "5", "6"]


def test_on_cpu_each_has_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 1, 2, 7})
    assert [share_of(n, 2, 1, cpu=True)["PIPELINE_CORES"] for n in (0, 1)] == ["1,3", "2,7"]
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {5})
    assert share_of(1, 2, 1, cpu=True)["PIPELINE_CORES"] == "5", "shared, if there are not enough"
