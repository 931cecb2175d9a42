"""Restart, halving and setting aside, on an engine that dies when a test wants it to."""

from collections.abc import Iterator

import pytest

from pipeline.engines.contract import EngineDeath
from pipeline.engines.supervisor import Death, SetAside, supervise
from pipeline.errors import EngineLostError
from pipeline.jobs import Request, Result


def request(name: str) -> Request:
    return Request(name, "/v1/chat/completions", {}, f"identity {name}", (), (), 1)


class StubEngine:
    """Runs up to `window` requests at once; dies whenever one in `poison` is among them."""

    def __init__(self, poison: set[str], window: int = 4, fails_to_start: int = 0) -> None:
        self.poison, self.window, self.fails_to_start = poison, window, fails_to_start
        self.starts = 0

    def run(self, requests: Iterator[Request | None]) -> Iterator[Result]:
        self.starts += 1
        flying: list[Request] = []
        for item in requests:
            if item is not None:
                flying.append(item)
                if self.starts <= self.fails_to_start:
                    raise EngineDeath("no start", tuple(flying), ready=False, log="log")
                if item.custom_id in self.poison:
                    raise EngineDeath("poison", tuple(flying), ready=True, log="log")
            while flying and (item is None or len(flying) >= self.window):
                yield Result(flying.pop(0).custom_id, 200, "", {}, None)
        for last in flying:
            yield Result(last.custom_id, 200, "", {}, None)


def drive(engine: StubEngine, names: list[str]) -> tuple[list[str], list[str], int]:
    """custom_ids answered, custom_ids set aside, deaths."""
    given = (request(name) for name in names)  # a generator: a death must not close it
    events = list(supervise(engine, given, sleep=lambda seconds: None))
    answered = [event.custom_id for event in events if isinstance(event, Result)]
    aside = [event.request.custom_id for event in events if isinstance(event, SetAside)]
    return answered, aside, sum(isinstance(event, Death) for event in events)


def test_every_request_is_answered_once_when_nothing_dies() -> None:
    assert drive(StubEngine(set()), list("abcdef")) == (list("abcdef"), [], 0)


@pytest.mark.parametrize("poison", [{"a"}, {"d"}, {"j"}, {"a", "b"}, {"c", "g", "j"}])
def test_poison_is_set_aside_and_all_others_are_answered_once(poison: set[str]) -> None:
    names = list("abcdefghij")
    answered, aside, deaths = drive(StubEngine(poison), names)
    assert sorted(answered) == sorted(set(names) - poison)
    assert sorted(aside) == sorted(poison)
    assert deaths >= 2 * len(poison), "a request is set aside at its second death alone, not before"


def test_a_death_without_a_culprit_costs_nothing() -> None:
    class DiesOnce(StubEngine):
        def run(self, requests: Iterator[Request | None]) -> Iterator[Result]:
            self.poison = {"c"} if self.starts == 0 else set()
            return super().run(requests)

    answered, aside, deaths = drive(DiesOnce(set()), list("abcde"))
    assert (sorted(answered), aside, deaths) == (list("abcde"), [], 1)


def test_a_start_that_fails_now_and_then_is_tried_again() -> None:
    answered, aside, deaths = drive(StubEngine(set(), fails_to_start=3), list("ab"))
    assert (sorted(answered), aside, deaths) == (list("ab"), [], 3)


def test_an_engine_that_never_starts_is_given_up() -> None:
    engine = StubEngine(set(), fails_to_start=100)
    with pytest.raises(EngineLostError, match="can't be started: no start"):
        drive(engine, list("ab"))
    assert engine.starts == 4


def test_waiting_grows_with_each_fruitless_start() -> None:
    waits: list[float] = []
    engine = StubEngine(set(), fails_to_start=3)
    list(supervise(engine, map(request, "a"), sleep=waits.append))
    assert waits == [1.0, 2.0, 4.0]
