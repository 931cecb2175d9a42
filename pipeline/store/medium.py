"""What a cache lies on: the few things that are done to files below it, whatever holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

T = TypeVar("T")

TAIL_BYTES = 1 << 16  # of an entry: its footer stands there, and is a tenth of that


class DamagedError(Exception):
    """What was read is not what was written; the text says how that is known."""


class FileState(Protocol):
    """Of a file: kind, size in bytes, last use; named as by os.stat, which a disk gives."""

    @property
    def st_mode(self) -> int: ...
    @property
    def st_size(self) -> int: ...
    @property
    def st_mtime(self) -> float: ...
    @property
    def st_mtime_ns(self) -> int: ...


class Listed(NamedTuple):
    """A name in a directory; with its state where the listing tells it."""

    name: str
    is_directory: bool
    state: FileState | None = None


class Access(Protocol):
    """What whoever uses entries does to files, by their path from the cache's root with slashes.

    Every method raises StoreError where the medium can't be reached or refuses.
    """

    def has(self, name: str) -> bool:
        """True if the file is there; counts as a use of it."""

    def load(self, name: str, parse: Callable[[bytes], T], last: int | None = None) -> T:
        """`parse` of the whole file, or of up to `last` bytes at its end.

        `parse` raises DamagedError for bytes that must not be used, and so does this if there is
        no other copy. Raises FileNotFoundError, or OSError where a disk can't read.
        """

    def write(self, name: str, data: bytes | memoryview, *, once: bool = True) -> None:
        """Let the file be there, whole or not at all; with `once`, one that is there stays."""

    def set_aside(self, name: str, why: str) -> str | None:
        """Move a bad file to the quarantine, the reason beside it; where to, None if it is gone."""

    def note_use(self, name: str, known: FileState | None = None) -> None:
        """Say that a file is used now, at most daily; `known` is its state as of late."""


class Medium(Access, Protocol):
    """The same, with what it takes to look after a cache."""

    def address(self, name: str = "") -> str:
        """Where a file lies, for people."""

    def is_there(self) -> bool:
        """True if there is a cache, be it empty."""

    def top(self) -> list[str]:
        """Names at the root; none where there is no cache yet."""

    def listed(self, directory: str) -> list[Listed]:
        """What a directory holds, in the order of names; nothing if it is not there."""

    def state(self, name: str, *, link: bool = False) -> FileState | None:
        """Of a file, or with `link` of the link itself; None if it is not there.

        Raises OSError where a disk can't tell.
        """

    def read(self, name: str, last: int | None = None) -> bytes:
        """The whole file, or up to `last` bytes at its end; raises as `load` does."""

    def delete(self, name: str) -> None:
        """Let the file be gone."""
