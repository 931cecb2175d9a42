"""Every file below the cache, a directory at a time: a million entries are never in one list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.store.layout import VERSION
from pipeline.store.location import Location
from pipeline.store.media import medium_of
from pipeline.store.medium import FileState, Medium

_DEPTH = 3  # tower or documents / two hex digits / file


@dataclass(frozen=True, slots=True)
class Place:
    """A file below the version directory: its path from there, and its state where it is known."""

    name: str
    state: FileState | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """The names on its way."""
        return tuple(self.name.split("/"))


def walk(root: Location, after: str | None = None) -> Iterator[Place]:
    """The files of the cache `root` in the order of their names, those past `after` alone.

    A directory that stands where a file should be comes as a file. Raises StoreError where a
    directory can't be listed.
    """
    past = () if after is None else tuple(after.split("/"))
    yield from _walk(medium_of(root), (), past)


def _walk(medium: Medium, above: tuple[str, ...], past: tuple[str, ...]) -> Iterator[Place]:
    for name, is_directory, state in medium.listed("/".join((VERSION, *above))):
        parts = (*above, name)
        if parts < past[: len(parts)]:
            continue
        if is_directory and len(parts) < _DEPTH:
            yield from _walk(medium, parts, past)
        elif parts > past:
            yield Place("/".join(parts), state)
