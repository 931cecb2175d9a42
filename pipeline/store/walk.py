"""Every file below the cache, a directory at a time: a million entries are never in one list."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import StoreError
from pipeline.store.layout import version_directory

_DEPTH = 3  # tower or documents / two hex digits / file


@dataclass(frozen=True, slots=True)
class Place:
    """A file below the version directory: its path from there, and the same whole."""

    name: str
    path: str

    @property
    def parts(self) -> tuple[str, ...]:
        """The names on its way."""
        return tuple(self.name.split("/"))


def walk(root: Path, after: str | None = None) -> Iterator[Place]:
    """The files of the cache `root` in the order of their names, those past `after` alone.

    A directory that stands where a file should be comes as a file. Raises StoreError where a
    directory can't be listed.
    """
    past = () if after is None else tuple(after.split("/"))
    yield from _walk(str(version_directory(root)), (), past)


def _walk(directory: str, above: tuple[str, ...], past: tuple[str, ...]) -> Iterator[Place]:
    for name, is_directory in _listed(directory, top=not above):
        parts = (*above, name)
        if parts < past[: len(parts)]:
            continue
        path = f"{directory}/{name}"
        if is_directory and len(parts) < _DEPTH:
            yield from _walk(path, parts, past)
        elif parts > past:
            yield Place("/".join(parts), path)


def _listed(directory: str, top: bool) -> list[tuple[str, bool]]:
    """Names in a directory with whether each is one; a link to a directory is."""
    try:
        with os.scandir(directory) as found:
            return sorted((each.name, each.is_dir()) for each in found)
    except FileNotFoundError:  # no cache yet, or a directory that has gone meanwhile
        return []
    except NotADirectoryError:
        if not top:
            return []
        raise StoreError(
            f"`{directory}` is no directory", "a file stands where the cache should be"
        ) from None
    except OSError as error:
        raise StoreError(
            f"can't list `{directory}`: {error.strerror or error}", "check the directory's owner"
        ) from error
