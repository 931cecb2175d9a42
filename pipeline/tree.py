"""The files below a directory, as both the search for pages and a rerun over them walk it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def files_below(root: str | Path, order: Callable[[str], Any] | None = None) -> Iterator[str]:
    """Paths of the files below `root`, those of a directory sorted by the `order` of their names.

    Hidden files and directories are passed over. Links are followed, no directory is seen twice:
    what lies below the root is visited under its own name, never through a link; so a link back up
    is harmless and the names do not depend on the order of the visit. A directory that can't be
    listed comes as a file.
    """
    top = os.fspath(root)
    real_top = os.path.realpath(top)
    seen = set[str]()
    pending = [(top, True, False)]
    while pending:
        path, is_directory, is_link = pending.pop()
        if not is_directory:
            yield path
            continue
        real = os.path.realpath(path)
        if real in seen or (
            is_link and path != top and (real + os.sep).startswith(real_top + os.sep)
        ):
            continue
        seen.add(real)
        try:
            with os.scandir(path) as found:
                children = [child for child in found if not child.name.startswith(".")]
        except OSError:
            yield path
            continue
        if order is not None:
            children.sort(key=lambda child: order(child.name), reverse=True)
        pending += [(child.path, _is_directory(child), child.is_symlink()) for child in children]


def _is_directory(child: os.DirEntry[str]) -> bool:
    try:
        return child.is_dir()
    except OSError:
        return False


def natural_key(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """Sort key: runs of digits by value, the rest by code point; the name itself breaks ties."""
    parts = re.findall(r"([0-9]+)|([^0-9]+)", name)
    return [(0, int(digits), "") if digits else (1, 0, text) for digits, text in parts], name
