"""Embeddings that a job brings along, checked in full before an engine starts.

A part is `{"type": "image_embeds", "image_embeds": …}` in vLLM's own form for the model: base64
of `torch.save` (or of a .npy file) alone, or in an object with the grid or sizes beside it.
"""

from __future__ import annotations

import base64
import binascii
import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.engines.misfit import misfit, rows_misfit
from pipeline.errors import Failure
from pipeline.families import Delivery
from pipeline.geometry import Geometry
from pipeline.jobs import CACHE_PREFIX, content_parts
from pipeline.run.survey import JobSource

if TYPE_CHECKING:
    import torch

MAX_EMBEDDING_BYTES = 1 << 30  # of one image, before and after unpacking
_FIELDS = {
    Delivery.GRID: {"image_embeds", "image_grid_thw"},
    Delivery.SIZES: {"image_embeds", "image_sizes"},
}


class _BadEmbeddingError(Exception):
    """One part can't be used, and why."""


@dataclass(frozen=True, slots=True)
class InlineForm:
    """What the model takes: the form, values per row, and how pages are sized."""

    delivery: Delivery
    row_width: int
    geometry: Geometry


def inline_faults(source: JobSource, form: InlineForm) -> dict[str, str]:
    """custom_id → what is wrong with an embedding that the line brings along.

    Imports torch; one line is in memory at a time.
    """
    faults: dict[str, str] = {}
    for line in source.lines():
        if isinstance(line, Failure):
            continue
        for number, part in enumerate(content_parts(line.body), 1):
            if part["type"] == "image_embeds":
                try:
                    _check(part, form)
                except _BadEmbeddingError as error:
                    faults[line.custom_id] = f"content part {number}: {error}"
                    break
    return faults


def _check(part: Mapping[str, Any], form: InlineForm) -> None:
    if "uuid" in part:
        # vLLM believes it: another page of the same shape would get this one's answer
        raise _BadEmbeddingError("image_embeds with a uuid, which vLLM would trust; leave it out")
    held = part.get("image_embeds")
    match form.delivery:
        case Delivery.PROMPT:
            raise _BadEmbeddingError("this model takes embeddings from the cache only")
        case Delivery.ROWS:
            _require_rows(rows_misfit(_tensor(held), form.row_width))
        case Delivery.GRID:
            fields = _fields(held, form)
            grid = _numbers(fields["image_grid_thw"], 3)
            rows = _tensor(fields["image_embeds"])
            data = {"image_embeds": rows, "image_grid_thw": grid[None]}
            merge = int(getattr(form.geometry, "merge_size", 1))
            _require_rows(misfit(data, width=form.row_width, merge=merge))
        case Delivery.SIZES:
            fields = _fields(held, form)
            width_px, height_px = _numbers(fields["image_sizes"], 2).tolist()
            rows = _tensor(fields["image_embeds"])
            _require_rows(rows_misfit(rows, form.row_width))
            expected = form.geometry.place(max(1, height_px), max(1, width_px)).tokens
            if min(height_px, width_px) < 1 or len(rows) != expected:
                raise _BadEmbeddingError(
                    f"image_embeds has {len(rows)} rows, a page of {width_px} x {height_px} px "
                    f"asks for {expected}"
                )


def _require_rows(reason: str) -> None:
    if reason:
        raise _BadEmbeddingError(reason)


def _fields(held: Any, form: InlineForm) -> Mapping[str, Any]:
    wanted = _FIELDS[form.delivery]
    if not isinstance(held, Mapping) or set(held) != wanted:
        found = sorted(held) if isinstance(held, Mapping) else type(held).__name__
        raise _BadEmbeddingError(f"image_embeds holds {found} instead of {sorted(wanted)}")
    return held


def _numbers(value: Any, count: int) -> torch.Tensor:
    """A list of whole numbers, or base64 of such a tensor, of shape (count,)."""
    import torch

    if isinstance(value, list):
        if len(value) != count or any(type(number) is not int for number in value):
            raise _BadEmbeddingError(f"{value!r:.60} is no list of {count} whole numbers")
        return torch.tensor(value)
    numbers = _tensor(value)
    if numbers.shape != (count,) or numbers.is_floating_point():
        found = f"{numbers.dtype} of shape {tuple(numbers.shape)}"
        raise _BadEmbeddingError(f"{found} instead of {count} numbers")
    return numbers


def _tensor(text: Any) -> torch.Tensor:
    """The tensor in a base64 string; nothing in it is run, and its size is known before."""
    import torch

    if not isinstance(text, str) or not text:
        raise _BadEmbeddingError(f"an embedding must be base64, found {type(text).__name__}")
    if text.startswith(CACHE_PREFIX):
        raise _BadEmbeddingError("references into the cache are made by the run, not by the job")
    if len(text) > MAX_EMBEDDING_BYTES:
        raise _BadEmbeddingError(f"{len(text)} bytes of base64, more than {MAX_EMBEDDING_BYTES}")
    try:
        data = base64.b64decode(text, validate=True)
        if data.startswith(b"\x93NUMPY"):
            import numpy as np

            return torch.from_numpy(np.load(io.BytesIO(data), allow_pickle=False))
        with zipfile.ZipFile(io.BytesIO(data)) as archive:  # the only form torch.save writes now
            unpacked = sum(member.file_size for member in archive.infolist())
        if unpacked > MAX_EMBEDDING_BYTES:
            raise _BadEmbeddingError(f"{unpacked} bytes unpacked, more than {MAX_EMBEDDING_BYTES}")
        tensor = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except _BadEmbeddingError:
        raise
    except binascii.Error as error:
        raise _BadEmbeddingError(f"not base64: {error}") from error
    except Exception as error:  # zipfile, numpy and torch raise a dozen types for damaged data
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise _BadEmbeddingError(f"no tensor: {reason:.200}") from error
    if not isinstance(tensor, torch.Tensor):
        raise _BadEmbeddingError(f"no tensor but a {type(tensor).__name__}")
    return tensor
