"""Settings of a model's JSON files, checked against defaults that show what each may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pipeline.errors import CheckpointError

_MAX_COUNT = 1 << 16  # layers, widths, patch sizes; a wrong file must not make us build for ever


def checked_settings(
    given: Any, defaults: Mapping[str, Any], where: str, largest: int = _MAX_COUNT
) -> dict[str, Any]:
    """`defaults`, overridden by what is given; raises CheckpointError for what can't be meant.

    A setting is of its default's type; whole numbers are from 0 to `largest`, a list of fractions
    is as long as its default. `where` names the JSON object that was given.
    """
    if not isinstance(given, Mapping):
        raise CheckpointError(f"{where} is no JSON object")
    settings = {name: given.get(name, value) for name, value in defaults.items()}
    for name, default in defaults.items():
        if not _fits(settings[name], default, largest):
            raise CheckpointError(f"{where}: {name} can't be {settings[name]!r:.100}")
    return settings


def _fits(value: Any, default: Any, largest: int) -> bool:
    if isinstance(default, list):
        same = isinstance(value, list | tuple)
        if isinstance(default[0], float):
            same = same and len(value) == len(default)
        return same and all(_fits(each, default[0], largest) for each in value)
    if isinstance(default, float):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and math.isfinite(value)
    if isinstance(default, int) and not isinstance(default, bool):
        return type(value) is int and 0 <= value <= largest
    return isinstance(value, type(default))
