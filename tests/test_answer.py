"""What becomes of requests: kept, asked again, given up, left for the next run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.config import EngineOptions
from pipeline.engines.contract import Engine
from pipeline.errors import Failure, JobError, Reason, Stage
from pipeline.jobs import Request, Result
from pipeline.journal import RunDirectory, open_run_directory
from pipeline.run.answer import Answering, Persistence, Tally, answer
from pipeline.run.choice import Choice, chosen, plan
from pipeline.run.ladder import Ladder
from pipeline.run.line import expire
from pipeline.run.requests import RequestMaker
from pipeline.run.stop import Stop
from pipeline.run.survey import JobSource

LOOP = "on and on\n" * 300
Say = Callable[[Request, int], Result]


def request(name: str, **body: Any) -> Request:
    return Request(name, "/v1/chat/completions", body, f"identity of {name}", (), (), 1)


def said(request: Request, text: str, finish: str = "stop") -> Result:
    choice = {"finish_reason": finish, "message": {"content": text}}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    return Result(request.custom_id, 200, "r", {"choices": [choice], "usage": usage}, None)


def refused(request: Request, status: int) -> Result:
    return Result(request.custom_id, status, "", None, f"status {status}")


class Talker:
    """An engine that says what `say(request, how often it was asked)` tells it to."""

    def __init__(self, say: Say) -> None:
        self.say, self.bodies = say, dict[str, list[dict[str, Any]]]()

    def run(self, requests: Iterator[Request | None]) -> Iterator[Result]:
        for each in requests:
            if each is not None:
                asked = self.bodies.setdefault(each.custom_id, [])
                asked.append(each.body)
                yield self.say(each, len(asked))

    def with_less_memory(self) -> None:
        return None

    def settings(self) -> EngineOptions:
        return EngineOptions()


def run(
    path: Path,
    names: str,
    say: Say,
    *,
    choice: Choice | None = None,
    stop: Stop | None = None,
    retries: int = 2,
    max_attempts: int = 3,
    **body: Any,
) -> tuple[Tally, Talker]:
    """One run of a job with a request per letter."""
    made = [request(name, **body) for name in names]
    pages = SimpleNamespace(target=SimpleNamespace(model=SimpleNamespace(revision=None)))
    maker = cast(RequestMaker, SimpleNamespace(requests=lambda: iter(made), pages=pages))
    engine, tally, stop = Talker(say), Tally(len(made)), stop or Stop()
    with open_run_directory(path) as directory:
        pending = plan(maker, directory, tally, choice or Choice(), max_attempts)
        persistence = Persistence(Ladder(retries), max_attempts)
        answering = Answering(maker, pending, directory, tally, persistence, stop)
        answer([cast(Engine, engine)], answering, quiet=True)
        expire(pending, directory, stop)
    return tally, engine


def lines(path: Path, name: str = "results.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


def texts(path: Path) -> dict[str, str]:
    found = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in lines(path)
    }
    assert len(found) == len(lines(path)), "a custom_id stands twice in results.jsonl"
    return found


def test_an_error_that_passes_costs_an_attempt(tmp_path: Path) -> None:
    tally, engine = run(
        tmp_path,
        "abc",
        lambda r, n: refused(r, 503) if r.custom_id == "b" and n < 3 else said(r, "x"),
    )
    assert (tally.succeeded, tally.failures, tally.left) == (3, {}, 0)
    assert [len(engine.bodies[name]) for name in "abc"] == [1, 3, 1]
    assert {line["custom_id"]: line["pipeline"]["attempts"] for line in lines(tmp_path)} == {
        "a": 1, "b": 3, "c": 1,
    }  # fmt: skip


def test_attempts_are_remembered_over_nights(tmp_path: Path) -> None:
    def down(r: Request, n: int) -> Result:
        return refused(r, 503) if r.custom_id == "b" else said(r, "x")

    tally, engine = run(tmp_path, "ab", down, max_attempts=2)
    assert len(engine.bodies["b"]) == 2 and tally.failures["b"].retryable
    tally, engine = run(tmp_path, "ab", down, max_attempts=2)
    assert engine.bodies == {} and tally.failures["b"].attempts == 2 and tally.reused == 1
    tally, engine = run(tmp_path, "ab", down, max_attempts=3)
    assert len(engine.bodies["b"]) == 1, "what is left of three"
    asked = Choice(retry_failed=True)
    tally, _ = run(tmp_path, "ab", lambda r, n: said(r, "y"), choice=asked, max_attempts=2)
    assert (tally.succeeded, tally.reused, tally.failures) == (1, 1, {})


def test_what_the_engine_rejects_is_not_asked_again(tmp_path: Path) -> None:
    def rejecting(r: Request, n: int) -> Result:
        return refused(r, 400) if r.custom_id == "a" else said(r, "x")

    for asked in (1, 0):
        tally, engine = run(tmp_path, "ab", rejecting)
        assert len(engine.bodies.get("a", [])) == asked
        assert tally.failures["a"].reason is Reason.REJECTED and tally.left == 0
    _, engine = run(tmp_path, "ab", rejecting, choice=Choice(retry_failed=True))
    assert list(engine.bodies) == ["a"]


def test_a_request_that_was_changed_is_another_one(tmp_path: Path) -> None:
    run(tmp_path, "a", lambda r, n: refused(r, 400))
    made = request("a")
    failure = Failure(None, None, Stage.ENGINE, Reason.REJECTED, custom_id="a")
    with open_run_directory(tmp_path) as directory:
        assert directory.failure_of("a", made.identity) is not None
        assert directory.failure_of("a", "another identity") is None
        directory.fail(failure, "another identity")
        assert directory.failure_of("a", made.identity) is None


def test_a_loop_is_asked_again_and_the_good_answer_kept(tmp_path: Path) -> None:
    tally, engine = run(
        tmp_path, "ab",
        lambda r, n: said(r, LOOP, "length") if r.custom_id == "a" and n == 1 else said(r, "fine"),
        temperature=0,
    )  # fmt: skip
    assert texts(tmp_path) == {"a": "fine", "b": "fine"}
    assert (tally.retried, tally.succeeded, dict(tally.flags)) == (1, 2, {})
    assert [body["temperature"] for body in engine.bodies["a"]] == [0, 0.3]
    (kept,) = lines(tmp_path / "attempts", "answers.jsonl")
    assert kept["response"]["body"]["choices"][0]["message"]["content"] == LOOP
    (line,) = [line for line in lines(tmp_path) if line["custom_id"] == "a"]
    assert line["pipeline"]["attempts"] == 2 and line["pipeline"]["flags"] == []
    assert line["pipeline"]["identity"] == "identity of a", "an answer keeps its line's identity"
    assert [each["flags"] for each in line["pipeline"]["tries"]] == [
        ["repetition", "truncated"], [],
    ]  # fmt: skip


def test_an_answer_that_stays_bad_is_kept_flagged_and_counted_each_night(tmp_path: Path) -> None:
    tally, _ = run(tmp_path, "a", lambda r, n: said(r, LOOP))
    assert texts(tmp_path) == {"a": LOOP} and dict(tally.flags) == {"repetition": 1}
    tally, engine = run(tmp_path, "a", lambda r, n: said(r, "fine"))
    assert engine.bodies == {} and dict(tally.flags) == {"repetition": 1} and tally.reused == 1
    tally, _ = run(tmp_path, "a", lambda r, n: said(r, "fine"), choice=Choice(retry_failed=True))
    assert texts(tmp_path) == {"a": "fine"} and dict(tally.flags) == {}
    (old,) = lines(tmp_path / "attempts", "superseded.jsonl")
    assert old["pipeline"]["flags"] == ["repetition"]


@pytest.mark.parametrize("status", [400, 500])
def test_a_retry_that_fails_costs_no_answer(tmp_path: Path, status: int) -> None:
    tally, _ = run(
        tmp_path, "a", lambda r, n: said(r, LOOP) if n == 1 else refused(r, status), max_attempts=2
    )
    assert texts(tmp_path) == {"a": LOOP} and (tally.succeeded, tally.failures) == (1, {})


def test_without_retries_answers_stay_as_they_are(tmp_path: Path) -> None:
    _, engine = run(tmp_path, "ab", lambda r, n: said(r, LOOP), retries=0)
    assert [len(bodies) for bodies in engine.bodies.values()] == [1, 1]


def test_asked_to_stop_nothing_more_is_fed_and_the_rest_expires(tmp_path: Path) -> None:
    stop = Stop()

    def stopping(r: Request, n: int) -> Result:
        stop.reason = "time" if r.custom_id == "b" else ""
        return said(r, "x")

    tally, engine = run(tmp_path, "abcd", stopping, stop=stop)
    assert list(engine.bodies) == ["a", "b"] and (tally.succeeded, tally.left) == (2, 2)
    events = [line for line in lines(tmp_path, "journal.jsonl") if line["event"] == "expired"]
    assert [event["custom_id"] for event in events] == ["c", "d"]
    tally, engine = run(tmp_path, "abcd", lambda r, n: said(r, "x"))
    assert list(engine.bodies) == ["c", "d"] and (tally.reused, tally.left) == (2, 0)


def test_an_answer_that_needs_another_try_when_time_is_up_stays_pending(tmp_path: Path) -> None:
    stop = Stop()

    def looping(r: Request, n: int) -> Result:
        stop.reason = "time"
        return said(r, LOOP)

    tally, _ = run(tmp_path, "a", looping, stop=stop)
    assert (tally.succeeded, tally.left) == (0, 1) and not lines(tmp_path)
    assert lines(tmp_path / "attempts", "answers.jsonl"), "it is kept, for people"


# ---------------------------------------------------------------- which requests


def job(tmp_path: Path, names: str) -> JobSource:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    text = "".join(
        json.dumps(
            {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        )
        + "\n"
        for name in names
    )
    (tmp_path / "job.jsonl").write_text(text + "not json\n")
    return JobSource.of(tmp_path / "job.jsonl", None, (), tmp_path / "attachments")


def named(source: JobSource) -> list[str | None]:
    return [line.custom_id for line in source.lines()]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    with open_run_directory(tmp_path / "job.run") as opened:
        yield opened


def test_all_lines_are_meant_unless_said(tmp_path: Path, directory: RunDirectory) -> None:
    assert named(chosen(job(tmp_path, "abc"), Choice(), directory)) == ["a", "b", "c", None]


def test_only_these(tmp_path: Path, directory: RunDirectory) -> None:
    source = chosen(job(tmp_path, "abcd"), Choice(only=frozenset("db")), directory)
    assert named(source) == ["b", "d"]
    with pytest.raises(JobError, match="has no request 'x'"):
        chosen(job(tmp_path, "abcd"), Choice(only=frozenset("bx")), directory)


def test_a_limit_counts_what_has_no_answer(tmp_path: Path) -> None:
    run(tmp_path / "job.run", "ac", lambda r, n: said(r, "x"))
    with open_run_directory(tmp_path / "job.run") as directory:
        source = chosen(job(tmp_path, "abcdef"), Choice(limit=2), directory)
    assert named(source) == ["a", "b", "c", "d", None] and source.beyond == frozenset("ef")
