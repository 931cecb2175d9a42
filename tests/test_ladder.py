"""How answers that are none are asked for again, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.run.ladder import REPETITION_DETECTION, Climb, Ladder

LOOP = "again and again\n" * 300
OBJECT = {"response_format": {"type": "json_object"}, "max_tokens": 100}


def record(text: str, finish: str = "stop", attempts: int = 1) -> dict[str, Any]:
    choices = [{"finish_reason": finish, "message": {"content": text}}]
    usage = {"completion_tokens": len(text)}
    return {
        "response": {"body": {"choices": choices, "usage": usage}},
        "pipeline": {"attempts": attempts, "flags": ["partial_page"]},
    }


def climb(
    asked: dict[str, Any], answers: list[tuple[str, str]], ladder: Ladder | None = None
) -> tuple[list[dict[str, Any] | None], Climb]:
    """The changes asked for after each answer, and the climb."""
    made, steps = Climb(asked), []
    for number, answer in enumerate(answers, start=1):
        made.add(record(*answer, attempts=number))
        made.changes = made.next_changes(ladder or Ladder()) or {}
        steps.append(made.changes or None)
    return steps, made


def warmer(temperature: float, seed: int, **more: Any) -> dict[str, Any]:
    return {"temperature": temperature, "seed": seed, **more}


DETECTED = {"repetition_detection": REPETITION_DETECTION}


@pytest.mark.parametrize(
    ("asked", "answers", "steps"),
    [
        ({}, [("fine", "stop")], [None]),
        # more tokens once, and for plain text only if asked for
        ({"max_tokens": 9}, [("cut", "length")], [None]),
        (OBJECT, [('{"a"', "length"), ('{"a"', "length")], [{"max_tokens": 200}, None]),
        ({"response_format": {"type": "json_object"}}, [("{", "length")], [None]),
        # loops with temperature, and vLLM's own look for them
        (
            {},
            [(LOOP, "length")] * 3,
            [warmer(0.3, 1, **DETECTED), warmer(0.7, 2, **DETECTED), None],
        ),
        ({"seed": 5, "temperature": 0.5}, [(LOOP, "stop")], [{"temperature": 0.5, **DETECTED}]),
        ({}, [("a" + " " * 400, "stop")], [warmer(0.3, 1)]),
        (OBJECT, [("{", "stop"), ("{}", "stop")], [warmer(0.3, 1), None]),
        # cut off first, then a loop
        (
            OBJECT,
            [("{", "length"), (LOOP, "length")],
            [{"max_tokens": 200}, warmer(0.3, 1, **DETECTED)],
        ),
    ],
)  # fmt: skip
def test_each_step(
    asked: dict[str, Any], answers: list[tuple[str, str]], steps: list[dict[str, Any] | None]
) -> None:
    assert climb(asked, answers)[0] == steps


def test_a_plain_text_is_given_more_tokens_if_asked_for() -> None:
    steps, _ = climb({"max_completion_tokens": 9}, [("cut", "length")], Ladder(more_tokens=True))
    assert steps == [{"max_completion_tokens": 18}]


def test_no_retries_is_no_ladder() -> None:
    assert climb({}, [(LOOP, "length")], Ladder(retries=0))[0] == [None]


def test_an_empty_answer_is_asked_for_once_more_as_it_was() -> None:
    made = Climb({})
    made.add(record(""))
    assert made.next_changes(Ladder()) == {}
    made.add(record(""))
    assert made.next_changes(Ladder()) is None
    assert made.best()["pipeline"]["flags"] == ["empty", "partial_page"]


@pytest.mark.parametrize(
    ("asked", "answers", "kept"),
    [
        ({}, [(LOOP, "length"), ("fine", "stop")], "fine"),
        ({}, [(LOOP, "length"), (LOOP, "stop"), ("fine", "stop")], "fine"),
        ({}, [(LOOP, "stop"), (LOOP + LOOP, "stop")], LOOP),  # none better: as it was asked
        (OBJECT, [("{", "length"), ("{1", "length")], "{1"),  # the longer of two that are cut
    ],
)
def test_the_best_is_kept(asked: dict[str, Any], answers: list[tuple[str, str]], kept: str) -> None:
    _, made = climb(asked, answers)
    best = made.best()
    assert best["response"]["body"]["choices"][0]["message"]["content"] == kept
    assert best["pipeline"]["attempts"] == len(answers)
    tries = best["pipeline"]["tries"]
    assert [each["finish_reasons"] for each in tries] == [[finish] for _, finish in answers]
    assert tries[0]["changes"] == {} and "changes" in tries[-1]


def test_an_answer_at_the_first_try_has_no_tries() -> None:
    _, made = climb({}, [("fine", "stop")])
    assert "tries" not in made.best()["pipeline"]
