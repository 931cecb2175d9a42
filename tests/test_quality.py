"""Which answers are none: literal texts and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.run.quality import flags_of, is_loop

SCHEMA = {"type": "object", "required": ["total"], "properties": {"total": {"type": "number"}}}
WANTS_OBJECT = {"response_format": {"type": "json_object"}}
WANTS_SCHEMA = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
}
STRUCTURED = {"structured_outputs": {"json": SCHEMA}}
TABLE = "Item  Price\n" + "0.00\n" * 40 + "Total 0.00"
TABLE_AT_THE_END = "Item  Price\n" + "0.00\n" * 40
LOOP = "Invoice 12\n" + "the same line again\n" * 300


def body(*texts: str | None, finish: str = "stop") -> dict[str, Any]:
    return {
        "choices": [
            {"finish_reason": finish, "message": {"role": "assistant", "content": text}}
            for text in texts
        ]
    }


@pytest.mark.parametrize(
    ("answer", "asked", "flags"),
    [
        (body("Invoice 12"), {}, ()),
        (body("Invoice 12", finish="length"), {}, ("truncated",)),
        (body(""), {}, ("empty",)),
        (body(" \n"), {}, ("empty",)),
        (body(None), {}, ("empty",)),
        (body(TABLE), {}, ()),
        (body(TABLE_AT_THE_END), {}, ()),
        (body(TABLE_AT_THE_END, finish="length"), {}, ("truncated",)),
        (body(LOOP), {}, ("repetition",)),
        (body(LOOP, finish="length"), {}, ("repetition", "truncated")),
        (body("a b", finish="repetition"), {}, ("repetition",)),
        (body("a" + " \n" * 200 + "b"), {}, ("whitespace",)),
        (body('{"total": 1}'), WANTS_OBJECT, ()),
        (body('{"total": 1'), WANTS_OBJECT, ("invalid_json",)),
        (body('{"total": 1', finish="length"), WANTS_OBJECT, ("invalid_json", "truncated")),
        (body("{"), {}, ()),
        (body('{"total": 1}'), WANTS_SCHEMA, ()),
        (body('{"total": "1"}'), WANTS_SCHEMA, ("invalid_json",)),
        (body('{"sum": 1}'), STRUCTURED, ("invalid_json",)),
        (body("[" * 100_000), WANTS_OBJECT, ("repetition", "invalid_json")),
        (body("fine", ""), {}, ("empty",)),
        ({"choices": [{"finish_reason": "length", "text": "on and on"}]}, {}, ("truncated",)),
        (
            {
                "choices": [
                    {"finish_reason": "tool_calls", "message": {"tool_calls": [{"id": "a"}]}}
                ]
            },
            {},
            (),
        ),
    ],
)
def test_what_stands_against_an_answer(
    answer: dict[str, Any], asked: dict[str, Any], flags: tuple[str, ...]
) -> None:
    assert flags_of(answer, asked) == flags


@pytest.mark.parametrize(
    ("text", "cut", "loop"),
    [
        ("-" * 400, False, False),  # a rule
        ("-" * 600, False, True),
        ("ab" * 59 + "a", True, False),
        ("12345 " * 59, True, False),
        ("12345 " * 61, True, True),
        ("12345 " * 60 + "123", True, True),  # cut off in the middle of the piece
        ("Start. " + ("x" * 199 + "y") * 6, True, True),  # a paragraph over and over
        ("Start. " + ("x" * 199 + "y") * 6, False, False),
        ("".join(f"line {number}\n" for number in range(500)), True, False),
        ("", True, False),
    ],
)
def test_a_loop_is_told_from_a_table(text: str, cut: bool, loop: bool) -> None:
    assert is_loop(text, cut=cut) is loop


def test_a_schema_that_is_none_asks_for_json_only() -> None:
    asked = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}}
    assert flags_of(body("{}"), asked) == ()
    assert flags_of(body("{"), asked) == ("invalid_json",)
