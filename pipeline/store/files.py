"""The write law of the cache: a name under `cache/` is whole or absent, also after a power cut."""

from __future__ import annotations

import errno
import time
from pathlib import Path

from pipeline.durable import replace_file, sync_directory
from pipeline.errors import StoreError
from pipeline.store.layout import QUARANTINE

_STEM_LENGTH = 160  # of a file in quarantine: names end at 255 bytes
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [data], shared=True)
    except OSError as error:
        raise write_error(path, error) from error


def set_aside(root: Path, path: Path, why: str) -> Path | None:
    """Move a bad file to the quarantine, with the reason beside it; None if it is gone."""
    ending = path.suffix if path.suffix != ".txt" else ".file"  # the reason is the .txt
    target = root / QUARANTINE / f"{path.stem[:_STEM_LENGTH]}.{time.time_ns()}{ending}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
        sync_directory(path.parent)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise write_error(target, error) from error
    write_whole(target.with_suffix(".txt"), (why + "\n").encode())
    return target
