"""Sizes and ages as people type and read them."""

from __future__ import annotations

import re
from typing import Any

import click

_BYTES = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTES |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


class ByteSize(click.ParamType):
    """A number of bytes: 180MB, 64MiB, 1000000."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"(\d+) ?([kmgt]i?b)?", str(value).strip().lower())
        size = int(found[1]) * _BYTES[found[2] or ""] if found else 0
        if size < 1:
            self.fail(f"{value!r} is no size; examples: 180MB, 64MiB, 1000000", param, ctx)
        return size


class Age(click.ParamType):
    """A span of time in seconds: 90d, 12h, 4w."""

    name = "AGE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"(\d{1,6}) ?([mhdw])", str(value).strip().lower())
        if found is None:
            self.fail(f"{value!r} is no age; examples: 90d, 12h, 4w", param, ctx)
        return int(found[1]) * _SECONDS[found[2]]


def shown_size(count_bytes: float) -> str:
    """`512 B`, `1.2 kB`, `3.4 GB`."""
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if count_bytes < 1000:
            break
        count_bytes, unit = count_bytes / 1000, larger
    return f"{count_bytes:.0f} B" if unit == "B" else f"{count_bytes:.1f} {unit}"


def entries(count: int) -> str:
    """`1 entry`, `2 entries`."""
    return f"{count} {'entry' if count == 1 else 'entries'}"
