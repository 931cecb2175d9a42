"""Lines with page images inside, for a server that has the tower."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from PIL import Image

from pipeline.emit.records import BatchLine, EmitOptions, batch_line
from pipeline.encode import Target
from pipeline.errors import Failure, Reason, Stage
from pipeline.geometry import AspectRatioError
from pipeline.jobs import ImageReference, JobLine, with_embeddings
from pipeline.pages import Page, decode_pages, discover
from pipeline.run.line import served_names
from pipeline.run.survey import JobSource, Survey


def native_lines(
    source: JobSource, survey: Survey, options: EmitOptions
) -> Iterator[BatchLine | Failure]:
    """Each request with its pages as PNG at model size, for a server that has the tower."""
    target = options.pages.target()
    names = served_names(None, (target.model.name,), survey)
    for line in source.lines():
        yield line if isinstance(line, Failure) else _native(line, target, names[0])


def _native(line: JobLine, target: Target, name: str) -> BatchLine | Failure:
    parts: list[dict[str, Any]] = []
    for image in line.images:
        url = page_url(image, target)
        if isinstance(url, Failure):
            return replace(url, custom_id=line.custom_id)
        parts.append({"type": "image_url", "image_url": {"url": url}})
    model = line.body.get("model", name)
    return batch_line(line.custom_id, line.url, with_embeddings(line, parts, model))


def page_url(image: ImageReference, target: Target) -> str | Failure:
    """The page as a `data:` url of a PNG, at model size unless the model's processor cuts it."""
    page = _decoded(image, target)
    if isinstance(page, Failure):
        return page
    height_px, width_px, _ = page.rgb.shape
    try:
        placement = target.spec.geometry.place(height_px, width_px)
    except AspectRatioError as error:
        return Failure(str(image.path), image.page, Stage.RESIZE, Reason.ASPECT_RATIO, str(error))
    buffer = io.BytesIO()
    pixels = target.family.resize(page.rgb, placement, target.spec)
    Image.fromarray(pixels).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getbuffer()).decode("ascii")


def _decoded(image: ImageReference, target: Target) -> Page | Failure:
    found = discover([image.path])
    if found.failures:
        return found.failures[0]
    only, passwords = frozenset({image.page}), target.decode.passwords
    return next(decode_pages(found.files[0], target.render, only=only, passwords=passwords))
