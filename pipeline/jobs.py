"""OpenAI batch lines in and out; the whole job file is validated before anything starts.

Format: https://platform.openai.com/docs/api-reference/batch/request-input. An image is an
`image_url` part whose url is a path relative to the job file (percent-encoded, `#page=N` from 1
the only fragment), a `file://` url or a `data:` url.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote_to_bytes, urlsplit

from pipeline.errors import Failure, JobError, Reason, Stage

SUPPORTED_URLS = ("/v1/chat/completions",)
MAX_LINE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ImageReference:
    """One image part of a job line: page `page` (from 1) of the file at `path`.

    `data` holds the decoded bytes of a `data:` url; `path` is then where they will be kept.
    """

    path: Path
    page: int
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class JobLine:
    """One valid line of a job file."""

    line_number: int
    custom_id: str
    url: str
    body: dict[str, Any]
    images: tuple[ImageReference, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """What an engine gets: a body whose image parts are references into the cache."""

    custom_id: str
    url: str
    body: dict[str, Any]
    identity: str
    keys: tuple[str, ...]
    pages: tuple[tuple[str, int], ...]
    embedding_bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """What an engine gives back for one request: vLLM's own status and response body."""

    custom_id: str
    status_code: int
    request_id: str
    body: dict[str, Any] | None
    error: str | None


@dataclass(frozen=True, slots=True)
class JobImage:
    """A page on its way into a job file; `paged` says that the file can hold several."""

    path: Path
    page: int
    paged: bool


class _Bad(Exception):
    """A line that can't be run; turned into a `Failure` by `read_job`."""

    def __init__(self, reason: Reason, detail: str, stage: Stage = Stage.VALIDATE) -> None:
        super().__init__(detail)
        self.reason, self.detail, self.stage = reason, detail, stage


# -- reading ------------------------------------------------------------------------------------


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
    allowed = [root.resolve() for root in roots] or [directory]
    seen: dict[str, int] = {}
    for number, raw in _numbered_lines(path):
        try:
            line = _parse_line(number, raw, directory, allowed, attachments)
        except _Bad as bad:
            yield Failure(
                file=str(path),
                page=None,
                stage=bad.stage,
                reason=bad.reason,
                detail=f"{path}:{number}: {bad.detail}",
                custom_id=_custom_id_of(raw),
            )
            continue
        if line.custom_id in seen:
            raise JobError(
                f"{path}:{number}: custom_id {line.custom_id!r} was already used on line "
                f"{seen[line.custom_id]}",
                "answers are matched by custom_id, so each must be unique in the file",
            )
        seen[line.custom_id] = number
        yield line


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise JobError(
            f"can't read job file `{path}`: {error.strerror}",
            "`pipeline encode PATH --job FILE --prompt TEXT` writes one",
        ) from error
    with file:
        for number, raw in enumerate(file, start=1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if raw.strip():
                yield number, raw


def _custom_id_of(raw: bytes) -> str | None:
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
    except (ValueError, RecursionError) as error:
        raise _Bad(Reason.BAD_LINE, f"not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise _Bad(Reason.BAD_LINE, f"expected a JSON object, found {type(record).__name__}")
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
            elif part["type"] != "text":
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
    parts = urlsplit(url)
    if parts.scheme in ("http", "https"):
        raise _Bad(Reason.BAD_IMAGE, f"a nightly job fetches nothing: {url}")
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
    name, _, number = fragment.partition("=")
    if name != "page" or not number.isascii() or not number.isdigit() or int(number) < 1:
        raise _Bad(Reason.BAD_IMAGE, f"the only fragment is #page=N with N from 1: {url}")
    return int(number)


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
    if not resolved.is_file():
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
    from blake3 import blake3

    return ImageReference(attachments / blake3(data).hexdigest(), 1, data)


# -- rewriting ----------------------------------------------------------------------------------


def with_embeddings(line: JobLine, parts: list[dict[str, Any]], model: str) -> dict[str, Any]:
    """The line's body with its image parts replaced by `parts`, in order."""
    body = copy.deepcopy(line.body)
    replacements = iter(parts)
    for part in _image_parts(body):
        replacement = next(replacements)
        part.clear()
        part.update(replacement)
    body["model"] = model
    return body


def cache_part(key: str, grid: tuple[int, ...]) -> dict[str, Any]:
    """An `image_embeds` part that refers to cache entry `key`; grid is (t, h, w) in patches."""
    return {
        "type": "image_embeds",
        "image_embeds": {"image_embeds": f"cache:{key}", "image_grid_thw": list(grid)},
        # the key is a content hash, so vLLM need not hash the tensor again
        "uuid": key,
    }


# -- writing ------------------------------------------------------------------------------------


def write_job(
    job_path: Path,
    images: Iterable[JobImage],
    *,
    inputs: list[Path],
    prompt: str,
    max_tokens: int,
    model_name: str,
    schema: dict[str, Any] | None = None,
    pages_per_request: int = 1,
) -> int:
    """Write one batch line per page (or per group of consecutive pages of one file).

    The prompt stands before the images, so that a prefix cache serves it. Returns the number of
    lines. The file appears whole or not at all.
    """
    temporary = job_path.with_name(f".{job_path.name}.tmp")
    job_path.parent.mkdir(parents=True, exist_ok=True)
    directory = job_path.parent.resolve()
    count = 0
    with temporary.open("w", encoding="utf-8") as file:
        for group in _groups(images, pages_per_request):
            content: list[dict[str, Any]] = [{"type": "text", "text": prompt}]
            content += [
                {"type": "image_url", "image_url": {"url": image_url(image, directory)}}
                for image in group
            ]
            body: dict[str, Any] = {
                "model": model_name,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": max_tokens,
                "temperature": 0,
            }
            if schema is not None:
                body["response_format"] = {
                    "type": "json_schema",
                    "json_schema": {"name": schema.get("title", "page"), "schema": schema},
                }
            line = {
                "custom_id": _custom_id(group, inputs),
                "method": "POST",
                "url": SUPPORTED_URLS[0],
                "body": body,
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            count += 1
    temporary.replace(job_path)
    return count


def _groups(images: Iterable[JobImage], size: int) -> Iterator[list[JobImage]]:
    group: list[JobImage] = []
    for image in images:
        if group and (len(group) == size or image.path != group[-1].path):
            yield group
            group = []
        group.append(image)
    if group:
        yield group


def image_url(image: JobImage, directory: Path) -> str:
    """Percent-encoded path of the page, relative to `directory` where that is possible."""
    relative = Path(_relative(image.path.resolve(), directory))
    return _quoted(relative) + (f"#page={image.page}" if image.paged else "")


def _relative(path: Path, directory: Path) -> str:
    import os

    return os.path.relpath(path, directory)


def _quoted(path: Path) -> str:
    return quote(path.as_posix().encode("utf-8", "surrogateescape"))


def _custom_id(group: list[JobImage], inputs: list[Path]) -> str:
    """The page's path below the input that holds it, in front the input's name if several."""
    first, last = group[0], group[-1]
    name = _below_input(first.path, inputs)
    if not first.paged:
        return name
    span = f"{first.page}" if first.page == last.page else f"{first.page}-{last.page}"
    return f"{name}#page={span}"


def _below_input(path: Path, inputs: list[Path]) -> str:
    for given in inputs:
        if path == given or path.is_relative_to(given):
            inner = path.relative_to(given) if path != given else Path(path.name)
            prefix = Path(given.resolve().name) if len(inputs) > 1 and path != given else Path()
            return _quoted(prefix / inner)
    return _quoted(path)


def with_page(image: JobImage, page: int) -> JobImage:
    """The same file's page `page`."""
    return replace(image, page=page)
