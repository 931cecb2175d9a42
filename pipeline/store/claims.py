"""Claims: encoders that are given the same pages at once split them, rather than encode each twice.

A claim is a lock on one byte of the empty file `cache/claims`, at an offset made of what is
claimed. It is an open-file-description lock (fcntl(2)): it ends with the process that holds it,
however that dies, so none is ever stale; on Linux it works over NFS as well. A claim saves work and
proves nothing: whoever has it looks again whether the work is still to be done.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Self

from pipeline.store.location import Location

_CLAIMS = "claims"

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_TAKEN = (errno.EAGAIN, errno.EACCES)


class Claims:
    """What this process has claimed, by locks in the file `path`.

    Where there are none (None: an object store; some network file systems, another system than
    64-bit Linux, a cache that can't be written) everything is granted: a page is then at worst
    encoded twice.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        if self._path is None:
            return self
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o666)
        except OSError:  # whoever writes the first entry says what is wrong
            self._descriptor = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def take(self, name: str) -> bool:
        """True if `name` is ours now, or was before; False if another process has it."""
        return self._set(name, fcntl.F_WRLCK)

    def drop(self, name: str) -> None:
        """Let others have `name`; nothing if it is not ours."""
        self._set(name, fcntl.F_UNLCK)

    def is_free(self, name: str) -> bool:
        """True unless another process has `name`."""
        if self._descriptor is None:
            return True
        lock = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _offset(name), 1, 0)
        try:
            found = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, lock)
        except OSError:
            return True
        return bool(_FLOCK.unpack(found)[0] == fcntl.F_UNLCK)

    def _set(self, name: str, kind: int) -> bool:
        if self._descriptor is None:
            return True
        lock = _FLOCK.pack(kind, os.SEEK_SET, _offset(name), 1, 0)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, lock)
        except OSError as error:
            return error.errno not in _TAKEN
        return True


def _offset(name: str) -> int:
    """Below 2^62. Two names with the same one would wait for each other, no more."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2


def claims_in(root: Location) -> Claims:
    """The claims of a cache; nothing is opened before they are entered."""
    return Claims(root / _CLAIMS if isinstance(root, Path) else None)
