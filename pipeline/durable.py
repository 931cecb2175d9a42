"""The write law: a name is whole or absent, also after a power cut.

Temporary file beside the target → close → fsync → rename → fsync of the directory. Whoever calls
turns an OSError into words: what to do about it depends on what was to be written.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

TEMPORARY_SUFFIX = ".tmp"


def replace_file(path: Path, chunks: Iterable[bytes | memoryview], *, shared: bool = False) -> None:
    """Let `path` hold `chunks`; nothing half-written is left, whatever `chunks` raises.

    `shared` says that others may write the same name at the same time. Raises OSError.
    """
    mark = f"{os.getpid()}.{secrets.token_hex(4)}." if shared else ""
    temporary = path.with_name(f".{path.name}.{mark}".rstrip(".") + TEMPORARY_SUFFIX)
    try:
        with open(temporary, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            sync(file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync(file: BinaryIO) -> None:
    """Make what was written to a file last."""
    file.flush()
    os.fsync(file)


def sync_directory(directory: Path) -> None:
    """Make a rename in `directory` last."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
