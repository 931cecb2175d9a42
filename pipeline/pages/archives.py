"""Zip, tar and Parquet files that hold page files, read in place.

What lies in one is named by a path that goes on behind the archive's own: `scans.zip/2024/a.png`,
`pages.parquet/image/17` (column and row, from 0).
"""

from __future__ import annotations

import functools
import io
import os
import re
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

from pipeline.errors import Reason, Stage
from pipeline.pages.records import Refused

# Larger members are refused from the archive's directory: a page file of 1 GiB is none.
MAX_MEMBER_BYTES = 1 << 30
_SUFFIXES = (".zip", ".tar", ".tgz", ".tar.gz", ".tbz2", ".tar.bz2", ".txz", ".tar.xz")
_SIGNATURES = {
    "zip": rb"PK(\x03\x04|\x05\x06)",
    "tar": rb".{257}ustar|\x1f\x8b|BZh[1-9]|\xfd7zXZ\x00",
    "parquet": rb"PAR1",
}


class Archive(Protocol):
    """An open archive."""

    def names(self) -> Iterator[str]:
        """Names of its members in stable order, no directories."""

    def open(self, name: str) -> BinaryIO:
        """A member's bytes; raises KeyError if there is none, Refused if it can't be read."""


def archive_kind(head: bytes) -> str | None:
    """The kind of archive that a file's first 1,024 bytes announce, None if they announce none."""
    for kind, pattern in _SIGNATURES.items():
        if re.match(pattern, head, re.DOTALL):
            return kind
    return None


def is_named_as_archive(path: Path) -> bool:
    """True for the extensions of zip and tar files; in a directory, only these are looked into.

    Many other formats are zip files: a word processor's document would give its pictures.
    """
    return path.name.lower().endswith(_SUFFIXES)


def archive_of(path: Path) -> tuple[Path, str] | None:
    """The archive that a path goes into and the member's name; None for any other path."""
    for parent in path.parents:
        if os.path.isdir(parent):
            return None
        if os.path.isfile(parent):
            return parent, os.fspath(path)[len(os.fspath(parent)) + 1 :]
    return None


def open_archive(path: Path) -> Archive:
    """An archive, kept open until others are asked for; raises Refused or OSError."""
    found = path.stat()
    return _opened(path, found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _opened(path: Path, size_bytes: int, mtime_ns: int) -> Archive:
    with open(path, "rb") as stream:
        kind = archive_kind(stream.read(1024))
    try:
        match kind:
            case "zip":
                return _Zip(path)
            case "tar":
                return _Tar(path)
            case "parquet":
                return _Parquet(path)
    except OSError:
        raise
    except Exception as error:  # what the readers raise on damaged archives is of many kinds
        raise Refused(Reason.CORRUPT, f"the archive is damaged: {error}") from error
    raise Refused(Reason.UNSUPPORTED, "not an archive")


def _plain(name: str) -> str:
    """The name as it comes out of a path: no `./`, no double slash."""
    return str(PurePosixPath(name))


def _is_page_name(name: str) -> bool:
    """False for hidden members, and for names that lead out of the archive."""
    path = PurePosixPath(name)
    return not path.is_absolute() and not any(part.startswith(".") for part in path.parts)


def _checked_size(size_bytes: int) -> None:
    if size_bytes > MAX_MEMBER_BYTES:
        detail = f"{size_bytes:,} bytes in the archive are above {MAX_MEMBER_BYTES:,}"
        raise Refused(Reason.TOO_LARGE, detail)


class _Zip:
    """Members in the order of the zip file's directory."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self._members = {
            _plain(member.filename): member
            for member in self._zip.infolist()
            if not member.is_dir() and _is_page_name(member.filename)
        }

    def names(self) -> Iterator[str]:
        yield from self._members

    def open(self, name: str) -> BinaryIO:
        member = self._members[name]
        _checked_size(member.file_size)
        if member.flag_bits & 1:
            raise Refused(Reason.ENCRYPTED, "the archive's member needs a password")
        try:
            with self._zip.open(member) as stream:
                return io.BytesIO(stream.read(member.file_size))
        except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError) as error:
            raise Refused(Reason.CORRUPT, f"the archive's member is damaged: {error}") from error


class _Tar:
    """Members in their own order: a compressed tar can only be read forward."""

    def __init__(self, path: Path) -> None:
        self._tar = tarfile.open(path, "r:*")  # noqa: SIM115 - stays open with this object
        self._members = {
            _plain(member.name): member
            for member in self._tar
            if member.isreg() and _is_page_name(member.name)
        }

    def names(self) -> Iterator[str]:
        yield from self._members

    def open(self, name: str) -> BinaryIO:
        member = self._members[name]
        _checked_size(member.size)
        try:
            stream = self._tar.extractfile(member)
            assert stream is not None, name
            data = stream.read()
        except (tarfile.TarError, EOFError, ValueError) as error:
            raise Refused(Reason.CORRUPT, f"the archive's member is damaged: {error}") from error
        if len(data) < member.size:
            raise Refused(Reason.TRUNCATED, "the archive ends within this member")
        return io.BytesIO(data)


class _Parquet:
    """Rows of the columns that hold bytes: binary ones, or structs with a binary `bytes`."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._file = pq.ParquetFile(path)
        self._columns: dict[str, str] = {}
        for field in self._file.schema_arrow:
            inner = [field.type.field(i) for i in range(field.type.num_fields)]
            if pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
                self._columns[field.name] = field.name
            elif any(each.name == "bytes" and pa.types.is_binary(each.type) for each in inner):
                self._columns[field.name] = f"{field.name}.bytes"
        groups = self._file.metadata.num_row_groups
        rows = [self._file.metadata.row_group(i).num_rows for i in range(groups)]
        self._starts = [sum(rows[:i]) for i in range(groups + 1)]
        self._held: tuple[int, str, list[bytes | None]] | None = None

    def names(self) -> Iterator[str]:
        for column in self._columns:
            for row in range(self._starts[-1]):
                yield f"{column}/{row}"

    def open(self, name: str) -> BinaryIO:
        column, _, number = name.rpartition("/")
        if column not in self._columns or not number.isdecimal():
            raise KeyError(name)
        row = int(number)
        group = next((i for i, end in enumerate(self._starts[1:]) if row < end), None)
        if group is None:
            raise KeyError(name)
        data = self._group(group, column)[row - self._starts[group]]
        if data is None:
            raise Refused(Reason.CORRUPT, "the row holds no bytes")
        _checked_size(len(data))
        return io.BytesIO(data)

    def _group(self, group: int, column: str) -> list[bytes | None]:
        """A column of a row group, kept until another is asked for."""
        if self._held is None or self._held[:2] != (group, column):
            self._held = None
            try:
                read: Any = self._file.read_row_group(group, columns=[self._columns[column]])
            except Exception as error:  # whatever pyarrow makes of a damaged file
                raise Refused(Reason.CORRUPT, f"the row group is damaged: {error}") from error
            values = read.column(0).to_pylist()
            values = [v["bytes"] if isinstance(v, dict) else v for v in values]
            self._held = (group, column, values)
        return self._held[2]


def open_member(archive: Path, name: str) -> BinaryIO:
    """A member's bytes; raises Refused or OSError."""
    try:
        return open_archive(archive).open(name)
    except KeyError as error:
        raise Refused(Reason.NOT_FOUND, "the archive has no such member", Stage.READ) from error
