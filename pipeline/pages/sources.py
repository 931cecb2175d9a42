"""Where the bytes of a page file come from: a file, or a member of an archive."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import Reason, Stage
from pipeline.keys import stream_digest
from pipeline.pages.archives import archive_of, open_member
from pipeline.pages.find import HEAD_BYTES, kind_of
from pipeline.pages.records import Refused, SourceFile


def open_source(path: Path) -> BinaryIO:
    """The bytes of a page file; raises OSError, and Refused for what an archive can't give."""
    try:
        return open(path, "rb")
    except (NotADirectoryError, FileNotFoundError):
        if (inside := archive_of(path)) is None:
            raise
        return open_member(*inside)


def source_stat(path: Path) -> os.stat_result:
    """The state of the file, or of the archive that it is in; raises OSError."""
    try:
        return path.stat()
    except NotADirectoryError:
        if (inside := archive_of(path)) is None:
            raise
        return inside[0].stat()


def source_digest(path: Path) -> tuple[str, str]:
    """(blake3 of the bytes, their kind or "") of a page file; raises OSError or Refused."""
    with open_source(path) as stream:
        head = stream.read(HEAD_BYTES)
        stream.seek(0)
        return stream_digest(stream), kind_of(head) or ""


@contextlib.contextmanager
def at_hand(file: SourceFile) -> Iterator[SourceFile]:
    """The file itself; of a member of an archive a copy, which is gone afterwards.

    Raises Refused.
    """
    if archive_of(file.path) is None:
        yield file
        return
    try:
        copy = tempfile.TemporaryFile()  # noqa: SIM115 - this `with` comes after the `try`
    except OSError as error:
        raise Refused(Reason.UNREADABLE, error.strerror or str(error), Stage.READ) from error
    with copy:
        try:
            with open_source(file.path) as stream:
                shutil.copyfileobj(stream, copy)
            copy.flush()
        except OSError as error:
            raise Refused(Reason.UNREADABLE, error.strerror or str(error), Stage.READ) from error
        yield replace(file, path=Path(f"/proc/self/fd/{copy.fileno()}"))
