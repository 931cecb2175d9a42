"""Content parts of a valid line's body: embeddings in place of images."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from pipeline.jobs.records import JobLine

CACHE_PREFIX = "cache:"


def content_parts(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every content part of a chat body, in prompt order."""
    for message in body.get("messages", []):
        content = message.get("content")
        yield from content if isinstance(content, list) else []


def with_embeddings(line: JobLine, parts: list[dict[str, Any]], model: str) -> dict[str, Any]:
    """The line's body with its image parts replaced by `parts`, in order."""
    body = copy.deepcopy(line.body)
    replacements = iter(parts)
    for part in content_parts(body):
        if part["type"] == "image_url":
            replacement = next(replacements)
            part.clear()
            part.update(replacement)
    body["model"] = model
    return body


def inline_embedding_bytes(body: dict[str, Any]) -> int:
    """Size of the `image_embeds` parts that a line brings along, as base64.

    They are passed on as they are, once `pipeline.run` has looked into them.
    """
    return sum(
        len(str(part.get("image_embeds")))
        for part in content_parts(body)
        if part["type"] == "image_embeds"
    )


def cache_part(key: str, **fields: list[int]) -> dict[str, Any]:
    """An `image_embeds` part that refers to cache entry `key`.

    `fields` are what the model wants besides the rows, `image_grid_thw` for one; without any,
    the reference stands alone.
    """
    reference = f"{CACHE_PREFIX}{key}"
    return {
        "type": "image_embeds",
        "image_embeds": {"image_embeds": reference, **fields} if fields else reference,
        # the key is a content hash, so vLLM need not hash the tensor again
        "uuid": key,
    }


def cache_key_of(part: dict[str, Any]) -> str | None:
    """The key in a part that `cache_part` made; None for any other part."""
    held = part.get("image_embeds")
    rows = held.get("image_embeds") if isinstance(held, dict) else held
    if isinstance(rows, str) and rows.startswith(CACHE_PREFIX):
        return rows.removeprefix(CACHE_PREFIX)
    return None


def put_inline(part: dict[str, Any], rows: str) -> None:
    """Replace a part's reference by the rows themselves, base64 as vLLM's parts want it."""
    del part["uuid"]  # a name for this cache; elsewhere vLLM shall hash
    if isinstance(part["image_embeds"], dict):
        part["image_embeds"]["image_embeds"] = rows
    else:
        part["image_embeds"] = rows
