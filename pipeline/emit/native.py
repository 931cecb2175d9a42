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
from pipeline.pages import Page, discover
from pipeline.pages.decoders import Decoders
from pipeline.pages.requests import DecodeRequest
from pipeline.run.line import served_names
from pipeline.run.survey import JobSource, Survey


def native_lines(
    source: JobSource, survey: Survey, options: EmitOptions
) -> Iterator[BatchLine | Failure]:
    """Each request with its pages as PNG at model size, for a server that has the tower."""
    target = options.pages.target()
    names = served_names(None, (target.model.name,), survey)
    with Decoders(1, target.decode.limits) as decoders:
        for line in source.lines():
            if isinstance(line, Failure):
                yield line
            else:
                yield _native(line, target, names[0], decoders)


def _native(line: JobLine, target: Target, name: str, decoders: Decoders) -> BatchLine | Failure:
    parts: list[dict[str, Any]] = []
    for image in line.images:
        url = page_url(image, target, decoders)
        if isinstance(url, Failure):
            return replace(url, custom_id=line.custom_id)
        parts.append({"type": "image_url", "image_url": {"url": url}})
    model = line.body.get("model", name)
    return batch_line(line.custom_id, line.url, with_embeddings(line, parts, model))


def page_url(image: ImageReference, target: Target, decoders: Decoders) -> str | Failure:
    """The page as a `data:` url of a PNG, at model size unless the model's processor cuts it."""
    page = _decoded(image, target, decoders)
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


def _decoded(image: ImageReference, target: Target, decoders: Decoders) -> Page | Failure:
    found = discover([image.path])
    if found.failures:
        return found.failures[0]
    (file,) = found.files
    only, passwords = frozenset({image.page}), target.decode.passwords
    return decoders.page(DecodeRequest(file, target.render, only, passwords))
