"""The write law of the cache: a name under `cache/` is whole or absent, also after a power cut."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

from pipeline.errors import StoreError

TEMPORARY_SUFFIX = ".tmp"

_HINTS = {
    errno.ENOSPC: "free some space or choose another directory with `--cache DIR`",
    errno.EDQUOT: "the disk quota is used up; choose another directory with `--cache DIR`",
    errno.EACCES: "check the directory's owner, or choose another with `--cache DIR`",
    errno.EPERM: "check the directory's owner, or choose another with `--cache DIR`",
    errno.EROFS: "the file system is read-only; choose another directory with `--cache DIR`",
    errno.ENOTDIR: "a file stands where a directory should be; move it away",
    errno.EISDIR: "a directory stands where a file should be; move it away",
    errno.ENOTEMPTY: "a directory stands where a file should be; move it away",
    errno.EEXIST: "a file stands where a directory should be; move it away",
}


def write_error(path: Path, error: OSError) -> StoreError:
    """The error that stops a run whose cache can't be written."""
    hint = _HINTS.get(error.errno or 0, "check the disk, or choose another with `--cache DIR`")
    return StoreError(f"can't write `{path}`: {error.strerror or error}", hint)


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Temporary file beside the target, fsync, replace, fsync directory; raises StoreError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)
    except OSError as error:
        raise write_error(path, error) from error


def sync_directory(directory: Path) -> None:
    """Make a rename in `directory` last."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
