"""Is an answer one? Cut off, stuck in a loop, blank, or JSON that is none."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# A column of forty equal rows is a table; ten times that, or an endless one, is a loop.
LOOP_REPEATS, LOOP_REPEATS_AT_CUT = 100, 60
LOOP_CHARACTERS, LOOP_CHARACTERS_AT_CUT = 500, 300
LONG_UNIT, LONG_UNIT_REPEATS = 200, 6  # a paragraph over and over
MAX_UNIT = 1000  # characters of what is repeated
_WHITESPACE = re.compile(r"\s{300}")

DEFECTS = ("repetition", "whitespace", "invalid_json")  # what is there is of no use
REMARKS = ("truncated", "empty")  # may be what was asked for


def flags_of(body: Mapping[str, Any], asked: Mapping[str, Any]) -> tuple[str, ...]:
    """What is wrong with a response body to the request body `asked`, of DEFECTS and REMARKS."""
    found = {flag for choice in body.get("choices") or [] for flag in _flags(choice, asked)}
    return tuple(flag for flag in (*DEFECTS, *REMARKS) if flag in found)


def text_of(choice: Mapping[str, Any]) -> str:
    """The text of a choice, of a chat completion or a plain one; empty where there is none."""
    message = choice.get("message")
    text = message.get("content") if isinstance(message, Mapping) else choice.get("text")
    return text if isinstance(text, str) else ""


def _flags(choice: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[str]:
    finish, text = choice.get("finish_reason"), text_of(choice)
    if finish == "length":
        yield "truncated"
    if finish == "repetition" or is_loop(text, cut=finish == "length"):
        yield "repetition"
    if _WHITESPACE.search(text):
        yield "whitespace"
    message = choice.get("message")
    if not text.strip() and not (isinstance(message, Mapping) and message.get("tool_calls")):
        yield "empty"
    elif (valid := _validator_of(asked)) is not None and not valid(text):
        yield "invalid_json"


def is_loop(text: str, *, cut: bool) -> bool:
    """True if a text ends in one and the same piece again and again.

    `cut` says that it did not end by itself, but at its limit of tokens.
    """
    text = text.rstrip()
    least = LOOP_REPEATS_AT_CUT if cut else LOOP_REPEATS
    span = LOOP_CHARACTERS_AT_CUT if cut else LOOP_CHARACTERS
    for unit in range(1, min(MAX_UNIT, len(text) // 2) + 1):
        if text[-unit:] != text[-2 * unit : -unit]:
            continue
        length = _periodic_tail(text, unit)
        repeats = length // unit
        if repeats >= least and length >= span:
            return True
        if cut and unit >= LONG_UNIT and repeats >= LONG_UNIT_REPEATS:
            return True
    return False


def _periodic_tail(text: str, unit: int) -> int:
    """How many characters at the end repeat with a period of `unit`."""
    start = len(text) - 2 * unit
    while start >= unit and text[start - unit : start] == text[start : start + unit]:
        start -= unit
    while start > 0 and text[start - 1] == text[start - 1 + unit]:
        start -= 1
    return len(text) - start


def _validator_of(asked: Mapping[str, Any]) -> Callable[[str], bool] | None:
    """The check of a text against the JSON that was asked for; None if none was."""
    wanted = asked.get("response_format")
    if isinstance(wanted, Mapping):
        if wanted.get("type") == "json_object":
            return _is_json
        held = wanted.get("json_schema")
        if wanted.get("type") == "json_schema" and isinstance(held, Mapping):
            return _schema_check(json.dumps(held.get("schema"), sort_keys=True))
    outputs = asked.get("structured_outputs")
    if isinstance(outputs, Mapping) and outputs.get("json") is not None:
        schema = outputs["json"]
        text = schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True)
        return _schema_check(text)
    return None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


@functools.lru_cache(maxsize=64)
def _schema_check(schema_text: str) -> Callable[[str], bool]:
    """A schema that is none asks for JSON, no more: what is wrong with it is said elsewhere."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    schema = json.loads(schema_text)
    if not isinstance(schema, dict | bool):
        return _is_json
    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError:
        return _is_json
    validator = kind(schema)

    def valid(text: str) -> bool:
        try:
            return bool(validator.is_valid(json.loads(text)))
        except (ValueError, RecursionError):
            return False

    return valid
