"""The write law of the cache: a name under `cache/` is whole or absent, also after a power cut."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from pipeline.durable import replace_file
from pipeline.errors import StoreError

_HINTS = {
    errno.ENOSPC: "free some space or choose another directory with `--cache DIR`",
    errno.EDQUOT: "the disk quota is used up; choose another directory with `--cache DIR`",
    errno.EFBIG: "files of this size are not allowed here; raise `ulimit -f`",
    errno.EACCES: "check the directory's owner, or choose another with `--cache DIR`",
    errno.EPERM: "check the directory's owner, or choose another with `--cache DIR`",
    errno.EROFS: "the file system is read-only; choose another directory with `--cache DIR`",
    errno.ENOTDIR: "a file stands where a directory should be; move it away",
    errno.EISDIR: "a directory stands where a file should be; move it away",
    errno.ENOTEMPTY: "a directory stands where a file should be; move it away",
    errno.EEXIST: "a file stands where a directory should be; move it away",
}
_WANT_OF_ROOM = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    *(errno.EROFS, errno.EACCES, errno.EPERM),  # whoever looks for another place asks how large
)


def write_error(path: Path, error: OSError, needed_bytes: int | None = None) -> StoreError:
    """The error that stops a run whose cache can't be written, for want of `needed_bytes`."""
    hint = _HINTS.get(error.errno or 0, "check the disk, or choose another with `--cache DIR`")
    room = _room(path, error, needed_bytes)
    return StoreError(f"can't write `{path}`: {error.strerror or error}{room}", hint)


def _room(path: Path, error: OSError, needed_bytes: int | None) -> str:
    """What was needed, and what there is instead where the file system tells."""
    if needed_bytes is None or error.errno not in _WANT_OF_ROOM:
        return ""
    needed = f"{needed_bytes:,} bytes needed"
    if error.errno != errno.ENOSPC:
        return f" ({needed})"
    try:
        found = os.statvfs(next(parent for parent in path.parents if parent.exists()))
    except OSError:
        return f" ({needed})"
    if found.f_files and not found.f_favail:
        return f" ({needed}, no inode free)"
    free_bytes = found.f_bavail * found.f_frsize
    # more than needed: some was freed since, or a limit that can't be seen from here
    return f" ({needed}, {free_bytes:,} free)" if free_bytes < needed_bytes else f" ({needed})"


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Temporary file beside the target, fsync, replace, fsync directory; raises StoreError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [data], shared=True)
    except OSError as error:
        raise write_error(path, error, memoryview(data).nbytes) from error
