"""Lines with their embeddings inside."""

from __future__ import annotations

import base64
import copy
import io
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pipeline.emit.records import BatchLine, EmitOptions, batch_line
from pipeline.errors import Failure, JobError, Reason, Stage, UsageError
from pipeline.families import Delivery
from pipeline.jobs import Request, cache_key_of, content_parts, put_inline
from pipeline.run.images import OpenPages, encode_apart, locate_images, open_pages
from pipeline.run.line import faults_of_inline, served_names
from pipeline.run.requests import RequestMaker
from pipeline.run.survey import JobSource, Survey
from pipeline.store import Entry


def embedded_lines(
    source: JobSource, survey: Survey, options: EmitOptions
) -> Iterator[BatchLine | Failure]:
    """Each request with the embeddings of its pages inside; missing ones are encoded first."""
    pages = open_pages(options.pages)
    family = pages.target.family
    if family.delivery is Delivery.PROMPT:
        raise UsageError(
            f"embeddings of {family.name} models can't stand in a job file: vLLM takes them only "
            "as part of the whole prompt",
            "`pipeline run --engine llm` does that; `pipeline emit --native` writes the images",
        )
    images = locate_images(survey.images, pages, options.encode, options.quiet, "emit")
    names = served_names(None, pages.model_names, survey)
    faults = faults_of_inline(source, survey, pages)
    maker = RequestMaker(source, images, names, pages, faults)
    _require_space(maker, options.out)
    for request in maker.requests():
        yield request if isinstance(request, Failure) else _embedded(request, pages, options)


def _require_space(maker: RequestMaker, out: Path) -> None:
    requests = (request for request in maker.requests() if isinstance(request, Request))
    needed = sum(request.embedding_bytes for request in requests) * 4 // 3
    free = shutil.disk_usage(out).free
    if needed > free:
        raise JobError(
            f"the job's embeddings take {needed / 1e9:.1f} GB, `{out}` has {free / 1e9:.1f} GB",
            "emit a part of the job, or to another disk",
        )


def _embedded(request: Request, pages: OpenPages, options: EmitOptions) -> BatchLine | Failure:
    entries: dict[str, Entry] = {}
    for key, page in zip(request.keys, request.pages, strict=True):
        entry = _entry(key, page, pages, options)
        if isinstance(entry, Failure):
            return replace(entry, custom_id=request.custom_id)
        entries[key] = entry
    body = copy.deepcopy(request.body)
    for part in content_parts(body):
        reference = cache_key_of(part)
        if reference is not None:
            put_inline(part, inline(entries[reference]))
    return batch_line(request.custom_id, request.url, body)


def inline(entry: Entry) -> str:
    """base64 of `torch.save` of the (rows, width) bfloat16 tensor, as vLLM's parts want it."""
    import torch

    buffer = io.BytesIO()
    # torch.save writes a view's whole storage, so the tensor must own exactly its values
    torch.save(entry.tensor().contiguous().clone(), buffer)
    return base64.b64encode(buffer.getbuffer()).decode("ascii")


def _entry(
    key: str, page: tuple[str, int], pages: OpenPages, options: EmitOptions
) -> Entry | Failure:
    """The entry with its digest checked; a bad one is set aside and made anew once."""
    store = pages.target.store
    found = store.get(key)
    if not isinstance(found, Entry) and options.encode:
        store.quarantine(key, found.why)
        encode_apart([(Path(page[0]), page[1])], options.pages, options.quiet)
        found = store.get(key)
    if isinstance(found, Entry):
        return found
    return Failure(page[0], page[1], Stage.STORE, Reason.BAD_ENTRY, found.why)
