"""Answers that are JSON become columns: the fields of their objects."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

Record = dict[str, Any]

_FENCE = re.compile(r"\s*```(?:json)?\s*\n(.*?)\n?```\s*", re.DOTALL)
NOT_JSON = "not_json"


def parsed(text: str | None) -> Record | None:
    """The object in an answer, bare or in a code fence; None if it is no JSON object."""
    if text is None:
        return None
    fenced = _FENCE.fullmatch(text)
    try:
        found = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def with_fields(record: Record, columns: Iterable[str] | None) -> Record:
    """The record with its answer's fields as columns; with None, as one object `parsed`."""
    found = parsed(record["text"])
    if found is None and record["text"] is not None:
        record = record | {"flags": [*record["flags"], NOT_JSON]}
    if columns is None:
        return record | {"parsed": found}
    return record | {column_of(name, record): (found or {}).get(name) for name in columns}


def column_of(name: str, record: Record) -> str:
    """The column of a field, which must not hide one of ours."""
    return f"json_{name}" if name in record else name


def types_of(records: Iterable[Record]) -> dict[str, type]:
    """Field → the one type of all its values; `object` where they differ or are nested."""
    types: dict[str, type] = {}
    for record in records:
        for name, value in (parsed(record["text"]) or {}).items():
            if value is not None:
                types[name] = _wider(types.get(name), value)
            else:
                types.setdefault(name, type(None))
    return types


def _wider(before: type | None, value: Any) -> type:
    kind = type(value) if isinstance(value, str | bool | int | float) else object
    if kind is int and abs(value) >= 1 << 63:
        kind = object
    if before in (None, type(None), kind):
        return kind
    return float if {before, kind} == {int, float} else object
