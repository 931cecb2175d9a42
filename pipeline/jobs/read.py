"""Job lines in: each is a `JobLine`, or the `Failure` that it is."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from blake3 import blake3

from pipeline.errors import Failure, JobError, Reason, Stage
from pipeline.jobs.records import SUPPORTED_URLS, ImageReference, JobLine
from pipeline.keys import canonical_json
from pipeline.pages.archives import archive_of

MAX_DEPTH = 100  # far below the depth at which a reader further on runs out of stack


class _Bad(Exception):
    """A line that can't be run; turned into a `Failure` by `read_job`."""

    def __init__(self, reason: Reason, detail: str, stage: Stage = Stage.VALIDATE) -> None:
        super().__init__(detail)
        self.reason, self.detail, self.stage = reason, detail, stage


def read_job(
    path: Path, *, base: Path | None = None, roots: Iterable[Path] = (), attachments: Path
) -> Iterator[JobLine | Failure]:
    """Yield each line of the job file as a `JobLine`, or as the `Failure` that it is.

    Streams: one line in memory at a time. Accepts a byte order mark, CRLF, blank lines and a
    missing last newline. Paths resolve against `base` (default: the job file's directory) and
    must end up, symlinks followed, inside one of `roots` (default: `base`). `data:` urls are
    given paths below `attachments`.

    Raises JobError if the file can't be read, or if two lines share a custom_id.
    """
    directory = (base or path.parent).resolve()
    allowed = list(dict.fromkeys(root.resolve() for root in roots)) or [directory]
    seen: dict[str, int] = {}
    for number, raw in numbered_lines(path):
        line: JobLine | Failure
        try:
            line = _parse_line(number, raw, directory, allowed, attachments)
        except _Bad as bad:
            line = Failure(
                file=str(path),
                page=None,
                stage=bad.stage,
                reason=bad.reason,
                detail=f"{path}:{number}: {bad.detail}",
                custom_id=custom_id_of(raw),
            )
        if line.custom_id in seen:
            raise JobError(
                f"{path}:{number}: custom_id {line.custom_id!r} was already used on line "
                f"{seen[line.custom_id]}",
                "answers are matched by custom_id, so each must be unique in the file",
            )
        if line.custom_id is not None:
            seen[line.custom_id] = number
        yield line


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a job file that are not blank, numbered from 1; raises JobError."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise JobError(f"job file `{path}` is no regular file", "it is read more than once")
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                if raw.strip():
                    yield number, raw
    except OSError as error:
        raise JobError(
            f"can't read job file `{path}`: {error.strerror or error}",
            "`pipeline encode PATH --job FILE --prompt TEXT` writes one",
        ) from error


def custom_id_of(raw: bytes) -> str | None:
    """The custom_id of a line, valid or not; None if it has none."""
    try:
        found = json.loads(raw).get("custom_id")
    except (ValueError, AttributeError, RecursionError):
        return None
    return found if isinstance(found, str) and found else None


def _parse_line(
    number: int, raw: bytes, directory: Path, allowed: list[Path], attachments: Path
) -> JobLine:
    try:
        record = json.loads(raw)
        canonical_json(record)  # refuses what Python takes and JSON lacks: NaN, lone surrogates
    except (ValueError, RecursionError) as error:
        raise _Bad(Reason.BAD_LINE, f"not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise _Bad(Reason.BAD_LINE, f"expected a JSON object, found {type(record).__name__}")
    if _deeper_than(MAX_DEPTH, record):
        raise _Bad(Reason.BAD_LINE, f"nested more than {MAX_DEPTH} levels deep")
    custom_id, url, body = record.get("custom_id"), record.get("url"), record.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise _Bad(Reason.BAD_FIELD, f"custom_id must be a non-empty string, found {custom_id!r}")
    if record.get("method") != "POST":
        raise _Bad(Reason.BAD_FIELD, f"method must be POST, found {record.get('method')!r}")
    if url not in SUPPORTED_URLS:
        raise _Bad(Reason.BAD_FIELD, f"url must be {' or '.join(SUPPORTED_URLS)}, found {url!r}")
    if not isinstance(body, dict):
        raise _Bad(Reason.BAD_FIELD, "body must be a JSON object")
    if body.get("stream"):
        raise _Bad(Reason.BAD_FIELD, "stream must be false in a batch")
    images = tuple(_reference(part, directory, allowed, attachments) for part in _image_parts(body))
    return JobLine(number, custom_id, url, body, images)


def _deeper_than(depth: int, record: dict[str, Any]) -> bool:
    level: list[Any] = [record]
    for _ in range(depth):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
    return bool(level)


def _image_parts(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The `image_url` parts of a chat body, in prompt order."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _Bad(Reason.BAD_FIELD, "body.messages must be a non-empty list")
    for message in messages:
        if not isinstance(message, dict):
            raise _Bad(Reason.BAD_FIELD, "each message must be a JSON object")
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                raise _Bad(Reason.BAD_FIELD, "each content part must be an object with a type")
            if part["type"] == "image_url":
                yield part
            elif part["type"] not in ("text", "image_embeds"):
                raise _Bad(
                    Reason.BAD_FIELD, f"content part of type {part['type']!r} is not supported"
                )


def _reference(
    part: dict[str, Any], directory: Path, allowed: list[Path], attachments: Path
) -> ImageReference:
    holder = part.get("image_url")
    url = holder.get("url") if isinstance(holder, dict) else holder
    if not isinstance(url, str) or not url:
        raise _Bad(Reason.BAD_IMAGE, "image_url.url must be a non-empty string")
    if url[:5].lower() == "data:":
        return _data_reference(url, attachments)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise _Bad(Reason.BAD_IMAGE, f"{url}: {error}") from error
    if parts.scheme in ("http", "https"):
        raise _Bad(Reason.BAD_IMAGE, f"images are not fetched, download it first: {url}")
    if parts.scheme not in ("", "file"):
        raise _Bad(Reason.BAD_IMAGE, f"unsupported image url scheme {parts.scheme!r}")
    raw_path, _, fragment = url.removeprefix("file://").partition("#")
    path = Path(_decoded_path(raw_path))
    return ImageReference(_inside(directory / path, allowed, url), _page_number(fragment, url))


def _decoded_path(raw_path: str) -> str:
    # surrogateescape: a file name may be any bytes
    decoded = unquote_to_bytes(raw_path).decode("utf-8", "surrogateescape")
    if "\0" in decoded:
        raise _Bad(Reason.BAD_IMAGE, "image path holds a null byte")
    return decoded


def _page_number(fragment: str, url: str) -> int:
    if not fragment:
        return 1
    found = re.fullmatch("page=0*([1-9][0-9]{0,8})", fragment)
    if found is None:
        raise _Bad(Reason.BAD_IMAGE, f"the only fragment is #page=N with N from 1: {url}")
    return int(found.group(1))


def _inside(path: Path, allowed: list[Path], url: str) -> Path:
    try:
        resolved = path.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symlinks
        raise _Bad(Reason.UNREADABLE, f"{url}: {error}", Stage.READ) from error
    if not any(resolved.is_relative_to(root) for root in allowed):
        places = ", ".join(f"`{root}`" for root in allowed)
        raise _Bad(
            Reason.OUTSIDE_ROOT, f"{url} lies outside {places}; allow it with --root", Stage.READ
        )
    if not os.path.isfile(resolved) and archive_of(resolved) is None:  # False for any name
        raise _Bad(Reason.NOT_FOUND, f"{url}: no such file `{resolved}`", Stage.READ)
    return resolved


def _data_reference(url: str, attachments: Path) -> ImageReference:
    head, comma, payload = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise _Bad(Reason.BAD_IMAGE, "a data: url must be base64: data:image/png;base64,…")
    try:
        data = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _Bad(Reason.BAD_IMAGE, f"data: url is not valid base64: {error}") from error
    return ImageReference(attachments / blake3(data).hexdigest(), 1, data)
