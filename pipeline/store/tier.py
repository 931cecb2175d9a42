"""The read-through tier's files: a directory that never takes more bytes than it may.

All that is in it can be fetched again: it may be deleted at any time, and what it holds is checked
whenever it is read, which is why nothing is synced here.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.durable import TEMPORARY_SUFFIX
from pipeline.errors import StoreError
from pipeline.store.files import write_error
from pipeline.store.use import TOUCH_AFTER_S

FOLDER = "read-through"  # a directory that is someone's cache stays one: only this is swept
TOTAL = "bytes"  # locked by whoever adds a file; holds what all of them take
_ROOM_LEFT = 0.1  # made at once, so that not every file costs a walk through the others
_HINT = "check `--cache-local`; without it, everything is read from the cache itself"


@dataclass(frozen=True, slots=True)
class TierFiles:
    """Files below `directory` by their path in the cache, least recently used first to go.

    A file's atime says when it was last used here, its mtime when that was last told the cache.
    Raises StoreError where the directory can't be used.
    """

    directory: Path
    max_bytes: int

    def read(self, name: str, last: int | None = None) -> bytes | None:
        """The whole file, or up to `last` bytes at its end; None if it is not here."""
        try:
            with open(self._path(name), "rb") as file:
                found = os.fstat(file.fileno())
                os.utime(file.fileno(), ns=(time.time_ns(), found.st_mtime_ns))
                if last is not None:
                    file.seek(max(0, found.st_size - last))
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            why = f"can't read `{self._path(name)}`: {error.strerror or error}"
            raise StoreError(why, _HINT) from error

    def keep(self, name: str, data: bytes | memoryview, told_ns: int = 0) -> None:
        """Have the file here, if it fits at all; its use was told the cache at `told_ns`."""
        size = memoryview(data).nbytes
        if size > self.max_bytes:
            return
        try:
            with self._locked() as descriptor:
                self._make_room(descriptor, size)
                self._write(name, data, told_ns)
        except FileNotFoundError:  # the directory was deleted at this moment
            pass
        except OSError as error:
            found = write_error(self._path(name), error, size)
            raise StoreError(found.message, _HINT) from error

    def drop(self, name: str) -> None:
        """Let the file be gone."""
        self._path(name).unlink(missing_ok=True)

    def is_to_be_told(self, name: str) -> bool:
        """True if the cache does not know of today's use of the file; it is told now."""
        path = self._path(name)
        try:
            found = os.stat(path)
            if time.time() - found.st_mtime <= TOUCH_AFTER_S:
                return False
            os.utime(path)
        except OSError:
            pass
        return True

    def _path(self, name: str) -> Path:
        return self.directory / FOLDER / name

    @contextmanager
    def _locked(self) -> Iterator[int]:
        (self.directory / FOLDER).mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self._path(TOTAL), flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    def _make_room(self, descriptor: int, size: int) -> None:
        """Count `size` in before it is there: whatever happens then, the total is not too low."""
        text = os.pread(descriptor, 32, 0)
        total = int(text) if text.isdigit() else self.max_bytes + 1
        if total + size > self.max_bytes:
            total = self._evict(size)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(total + size).encode(), 0)

    def _evict(self, size: int) -> int:
        """Delete the least recently used until `size` more fit; gives what is left in bytes."""
        files = sorted(self._files())
        total = sum(file_size for _, file_size, _ in files)
        if total + size <= self.max_bytes:
            return total
        goal = max(0, int((1 - _ROOM_LEFT) * self.max_bytes) - size)
        for _, file_size, path in files:
            if total <= goal:
                break
            os.unlink(path)
            total -= file_size
        return total

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """Last use in ns, size and path of each; what a killed writer left is removed."""
        for folder, _, names in os.walk(self.directory / FOLDER / "v1"):
            for name in names:
                path = f"{folder}/{name}"
                found = os.lstat(path)
                if name.endswith(TEMPORARY_SUFFIX):  # not another's: we hold the lock
                    os.unlink(path)
                else:
                    yield found.st_atime_ns, found.st_size, path

    def _write(self, name: str, data: bytes | memoryview, told_ns: int) -> None:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
        try:
            temporary.write_bytes(data)
            os.utime(temporary, ns=(time.time_ns(), told_ns))
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
