"""Find page files: stable order, type by content."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.errors import Failure, Reason, Stage
from pipeline.pages.archives import (
    archive_kind,
    archive_of,
    is_named_as_archive,
    open_archive,
    open_member,
)
from pipeline.pages.records import Discovery, Refused, SourceFile
from pipeline.tree import files_below, natural_key

SIGNATURES = {
    "png": rb"\x89PNG\r\n\x1a\n",
    "jpeg": rb"\xff\xd8\xff",
    "tiff": rb"II[\x2a\x2b]\x00|MM\x00[\x2a\x2b]",
    "webp": rb"RIFF.{4}WEBP",
    "gif": rb"GIF8[79]a",
    # "BM" also starts words: ask for one of the header sizes that exist
    "bmp": rb"BM.{12}[\x0c\x10\x28\x34\x38\x40\x6c\x7c]\x00\x00\x00",
    "jp2": rb"\x00\x00\x00\x0cjP  \r\n\x87\n|\xff\x4f\xff\x51",
    "avif": rb".{4}ftypavi[fs]",
    "heic": rb".{4}ftyp(hei[cxms]|hevc|mif1|msf1)",
    "pdf": rb".{0,1019}%PDF-",
}
HEAD_BYTES = 1024

# Extensions of page files. They never decide what a file is; but a file that carries one and holds
# no page is a damaged page, and passing it over in silence would lose it.
_PAGE_SUFFIXES = frozenset(
    {".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".tif", ".tiff", ".webp", ".bmp", ".gif"}
    | {".pdf", ".jp2", ".avif", ".heic"}
)


def discover(paths: Sequence[Path | str]) -> Discovery:
    """The page files among `paths` and in the directories among them.

    Paths keep their order, a directory's files come in natural order (page2 before page10), each
    file once. Hidden files and directories are passed over. A named file that is missing or holds
    no page is a failure; inside a directory or an archive it is counted as skipped. An archive
    is looked into if it is named, and in a directory by its extension.
    """
    files: dict[str, SourceFile] = {}
    failures: list[Failure] = []
    skipped = 0
    pageless: list[tuple[Path, os.stat_result]] = []
    for path in map(Path, paths):
        named = not os.path.isdir(path)  # unlike `Path.is_dir`, False for any name
        for found in [path] if named else map(Path, files_below(path, natural_key)):
            before = None if named else _stat(found)
            for outcome in _look_into(found, named):
                if isinstance(outcome, SourceFile):
                    files.setdefault(os.path.abspath(outcome.path), outcome)
                elif isinstance(outcome, Failure):
                    failures.append(outcome)
                else:
                    skipped += 1
                    if before is not None and not is_named_as_archive(found):
                        pageless.append((found, before))
    return Discovery(tuple(files.values()), skipped, tuple(failures), tuple(pageless))


def _stat(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _look_into(path: Path, named: bool) -> Iterator[SourceFile | Failure | None]:
    """What a file is; or what the members of an archive are."""
    head = _head(path, named)
    if not isinstance(head, bytes):
        yield head
        return
    found = _classify(path, head, named)
    looked_into = named or is_named_as_archive(path)
    if isinstance(found, SourceFile) or archive_kind(head) is None or not looked_into:
        yield found
        return
    try:
        for name in open_archive(path).names():
            member = path / name
            try:
                with open_member(path, name) as stream:
                    yield _classify(member, stream.read(HEAD_BYTES), named=False)
            except (Refused, OSError) as error:
                yield _refused(member, error)
    except (Refused, OSError) as error:
        yield _refused(path, error)


def _head(path: Path, named: bool) -> bytes | Failure | None:
    """A file's first bytes; None for what is no file and was not named."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return _unread(path, Reason.UNREADABLE, "not a regular file") if named else None
        with open(path, "rb") as stream:
            return stream.read(HEAD_BYTES)
    except FileNotFoundError:
        return _unread(path, Reason.NOT_FOUND, "no such file")
    except NotADirectoryError as error:
        if (inside := archive_of(path)) is None:
            return _unread(path, Reason.UNREADABLE, error.strerror or str(error))
    except OSError as error:
        return _unread(path, Reason.UNREADABLE, error.strerror or str(error))
    try:
        with open_member(*inside) as stream:
            return stream.read(HEAD_BYTES)
    except (Refused, OSError) as error:
        return _refused(path, error)


def _refused(path: Path, error: Refused | OSError) -> Failure:
    if isinstance(error, OSError):
        return _unread(path, Reason.UNREADABLE, error.strerror or str(error))
    return error.as_failure(path, None)


def _classify(path: Path, head: bytes, named: bool) -> SourceFile | Failure | None:
    """The file with its kind; None for a file without pages that nobody named."""
    if (kind := kind_of(head)) is not None:
        return SourceFile(path, kind)
    suffix = path.suffix.lower()
    if suffix in _PAGE_SUFFIXES:
        detail = f"the content is no {suffix[1:]} page" if head else "the file is empty"
        return Failure(str(path), None, Stage.DECODE, Reason.CORRUPT, detail)
    if named:
        return Failure(str(path), None, Stage.DECODE, Reason.UNSUPPORTED, "not a page format")
    return None


def _unread(path: Path, reason: Reason, detail: str) -> Failure:
    return Failure(str(path), None, Stage.READ, reason, detail, retryable=True)


def kind_of(head: bytes) -> str | None:
    """The page format that a file's first 1,024 bytes announce, None if they announce none."""
    for kind, pattern in SIGNATURES.items():
        if re.match(pattern, head, re.DOTALL):
            return kind
    return None
