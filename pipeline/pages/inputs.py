"""What a command line names: paths, patterns, and the lists of `--files-from`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.tree import natural_key


@dataclass(frozen=True, slots=True)
class Inputs:
    """Paths to search, and the inputs that a job names pages by.

    `roots` is empty where a list or a pattern was given: files from many directories then come
    one by one, their last names are often alike, and only the paths tell them apart.
    """

    paths: tuple[Path, ...]
    roots: tuple[Path, ...]


def gather_inputs(paths: Sequence[Path], listed: Iterable[Path]) -> Inputs:
    """The paths with their patterns expanded, then the listed ones, which are taken literally."""
    expanded = tuple(found for path in paths for found in expand(path))
    all_paths = (*expanded, *listed)
    return Inputs(all_paths, all_paths if all_paths == tuple(paths) else ())


def names_in(data: bytes) -> list[Path]:
    """The names in a list: each ends with a NUL if there is one, else with a line break.

    A name may be any bytes. Blank lines, a byte order mark and the CR of CRLF are no part of one.
    """
    if b"\0" in data:
        return [Path(os.fsdecode(name)) for name in data.split(b"\0") if name]
    lines = [line for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
    if all(line.endswith(b"\r") for line in lines):  # else the CR belongs to a name
        lines = [line[:-1] for line in lines]
    return [Path(os.fsdecode(line)) for line in lines]


def expand(path: Path) -> list[Path]:
    """What a pattern of `*`, `?`, `[` and `**` matches, in natural order.

    A path that exists, or that is no pattern, stands for itself; and so does a pattern without a
    match, which then is the missing file that a failure names. As in a shell, names with a dot in
    front match only a pattern that has one.
    """
    if not _is_magic(str(path)) or os.path.lexists(path):
        return [path]
    try:
        found = set(_matches(path))
    except OSError:  # a name too long, say
        return [path]
    return sorted(found, key=lambda match: [natural_key(part) for part in match.parts]) or [path]


def _matches(path: Path) -> Iterator[Path]:
    """Matches of a pattern; `**` enters no link, so that loops of them are harmless."""
    first = next(number for number, part in enumerate(path.parts) if _is_magic(part))
    base, rest = Path(*path.parts[:first]), list(path.parts[first:])
    while rest and rest[-1] == "**":  # a directory is searched in depth anyhow
        rest.pop()
    if not rest:
        yield from [base] if base.is_dir() else []
        return
    # pathlib takes `**` only as a whole component; elsewhere it means `*`
    parts = [part if part == "**" else re.sub(r"\*+", "*", part) for part in rest]
    dotted = any(part.startswith(".") for part in parts)
    for match in base.glob("/".join(parts)):
        inner = match.parts[len(base.parts) :]
        if dotted or not any(part.startswith(".") for part in inner):
            yield match


def _is_magic(text: str) -> bool:
    return any(each in text for each in "*?[")
