"""Job lines out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipeline.durable import TEMPORARY_SUFFIX, replace_file
from pipeline.errors import JobError
from pipeline.jobs.read import custom_id_of, numbered_lines
from pipeline.jobs.records import SUPPORTED_URLS, JobImage


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

    Raises JobError if two pages would get one custom_id, and where the file can't be written.
    """
    directory = job_path.parent.resolve()
    settings: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0}
    if schema is not None:
        named = {"name": schema.get("title", "page"), "schema": schema}
        settings["response_format"] = {"type": "json_schema", "json_schema": named}
    seen: set[str] = set()

    def lines() -> Iterator[bytes]:
        for group in _groups(images, pages_per_request):
            custom_id = _custom_id(group, inputs)
            if custom_id in seen:
                raise JobError(
                    f"two inputs give the custom_id {custom_id!r}",
                    "give inputs whose last names differ, or their common parent",
                )
            seen.add(custom_id)
            body = {"model": model_name, "messages": [_message(prompt, group, directory)]}
            line = {"custom_id": custom_id, "method": "POST", "url": SUPPORTED_URLS[0]}
            yield json.dumps(line | {"body": body | settings}, ensure_ascii=False).encode() + b"\n"

    with _writing(job_path):
        replace_file(job_path, lines())
    return len(seen)


def check_job_path(job_path: Path) -> None:
    """Raise JobError unless a job can be written there; what it replaces must be a job too."""
    if os.path.exists(job_path):
        first = next(numbered_lines(job_path), None)
        if first is not None and custom_id_of(first[1]) is None:
            raise JobError(
                f"`{job_path}` is there already and is no job file",
                "choose another name, or move that file away",
            )
    with _writing(job_path):
        probe = job_path.with_name(f".{job_path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
        probe.touch()
        probe.unlink()


@contextmanager
def _writing(job_path: Path) -> Iterator[None]:
    try:
        job_path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise JobError(
            f"can't write `{job_path}`: {error.strerror or error}", "choose another `--job FILE`"
        ) from error


def _message(prompt: str, group: list[JobImage], directory: Path) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": prompt}]
    content += [
        {"type": "image_url", "image_url": {"url": image_url(image, directory)}} for image in group
    ]
    return {"role": "user", "content": content}


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
    relative = Path(os.path.relpath(image.path.resolve(), directory))
    return _quoted(relative) + (f"#page={image.page}" if image.paged else "")


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
