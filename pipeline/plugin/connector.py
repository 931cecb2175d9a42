"""vLLM's media connector for references into the embedding cache.

`{"image_embeds": "cache:<key>", "image_grid_thw": [t, h, w]}` becomes the stored rows inside
vLLM's own process: a page of 5 to 45 MB is never sent as base64. Imported by the plugin after
vLLM has imported its own connector, never before.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media.connector import MediaConnector, global_thread_pool

from pipeline.plugin import ENV_CACHE, ENV_LOCAL, ENV_LOCAL_BYTES, ENV_TOWER, ENV_WIDTH

if TYPE_CHECKING:
    from pipeline.store import Location

PREFIX = "cache:"
BAD_ENTRY = "bad_cache_entry"  # `bad_cache_entry:<key>: why`: re-encode the page and try again
UNREACHABLE = "cache_unreachable"  # a cache elsewhere: the same request may be answered later
BAD_REFERENCE = "bad_cache_reference"  # the request or our own set-up is wrong

_KEY = re.compile(r"[0-9a-f]{64}")


class CacheConnector(MediaConnector):
    """Resolves `cache:<key>`; anything else is left to vLLM."""

    def fetch_image_embedding(self, data: str) -> torch.Tensor:
        """The rows behind a reference: (rows, width) bfloat16, contiguous.

        Raises VLLMValidationError, which fails this request alone.
        """
        if not data.startswith(PREFIX):
            return _of_this_width(super().fetch_image_embedding(data))
        return load_rows(data.removeprefix(PREFIX))

    async def fetch_image_embedding_async(self, data: str) -> torch.Tensor:
        """The same for vLLM's servers; reads in a thread, so that decoding goes on."""
        if not data.startswith(PREFIX):
            return _of_this_width(await super().fetch_image_embedding_async(data))
        loop = asyncio.get_running_loop()
        key = data.removeprefix(PREFIX)
        return await loop.run_in_executor(global_thread_pool, load_rows, key)


def _of_this_width(rows: torch.Tensor) -> torch.Tensor:
    """Inline rows, refused if they are not as wide as the model's.

    vLLM pads the parts of one request to the widest of them, so a narrow one next to a whole one
    would be answered, without its DeepStack columns.
    """
    width = os.environ.get(ENV_WIDTH)
    if width and (rows.ndim != 2 or rows.shape[1] != int(width)):
        raise VLLMValidationError(
            f"bad_embedding: shape {tuple(rows.shape)} instead of (rows, {width})"
        )
    return rows


def load_rows(key: str) -> torch.Tensor:
    """Read and verify one entry: (rows, width) bfloat16; see `fetch_image_embedding`."""
    if not _KEY.fullmatch(key):
        raise VLLMValidationError(f"{BAD_REFERENCE}: {key[:80]!r} is no cache key")
    root, tower = os.environ.get(ENV_CACHE), os.environ.get(ENV_TOWER)
    if not root or not tower:
        raise VLLMValidationError(f"{BAD_REFERENCE}: {ENV_CACHE} and {ENV_TOWER} must be set")
    from pipeline.errors import PipelineError
    from pipeline.store import BadEntry, Store

    try:
        entry = Store(_location(root), tower).get(key)
    except PipelineError as error:
        raise VLLMValidationError(f"{UNREACHABLE}: {error.message}; {error.hint}") from error
    if isinstance(entry, BadEntry):
        raise VLLMValidationError(f"{BAD_ENTRY}:{key}: {entry.why}")
    return entry.tensor()


def _location(root: str) -> Location:
    from pipeline.store.location import location_of, with_tier

    local, local_bytes = os.environ.get(ENV_LOCAL), os.environ.get(ENV_LOCAL_BYTES)
    return with_tier(
        location_of(root), Path(local) if local else None, int(local_bytes) if local_bytes else None
    )
