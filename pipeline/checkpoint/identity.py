"""Digests of a model: of the tower that encodes, and of what decides the answers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.checkpoint.model import Model, shard_path
from pipeline.checkpoint.weights import WeightLayout, read_header, shard_names, vision_places
from pipeline.errors import CheckpointError
from pipeline.keys import canonical_json

_IDENTITY_FILES = re.compile(
    r"config\.json|generation_config\.json|tokenizer.*|vocab\..*|merges\.txt|added_tokens\.json"
    r"|special_tokens_map\.json|chat_template.*|processor_config\.json"
)
_CHUNK_BYTES = 1 << 22


def tower_fingerprint(model: Model, layout: WeightLayout) -> str:
    """sha256 (64 hex) over the tower's settings and the names, types, shapes and bytes of its
    tensors; the same however the checkpoint is sharded, prefixed or quantised elsewhere."""
    places = vision_places(model, layout)
    table = [[name, place.dtype, list(place.shape)] for name, place in places.items()]
    head = {"config": layout.vision_config(model.config), "tensors": table}
    digest = hashlib.sha256(canonical_json(head))
    for place in places.values():
        for chunk in _chunks(shard_path(model, place.shard), place.start, place.stop):
            digest.update(chunk)
    return digest.hexdigest()


def _chunks(path: Path, start: int, stop: int) -> Iterator[bytes]:
    with open(path, "rb") as stream:
        stream.seek(start)
        while start < stop:
            chunk = stream.read(min(_CHUNK_BYTES, stop - start))
            if not chunk:
                raise CheckpointError(f"`{path}` is cut off", "fetch it again")
            start += len(chunk)
            yield chunk


def model_identity(model: Model) -> str:
    """sha256 (64 hex) of what decides the model's answers, without reading the weights.

    Config, generation config, tokenizer, chat template; each shard's name, size and header; the
    commit of a hub model. Shards of a hub model that are not here yet count by name.
    """
    small = sorted(path for path in model.path.iterdir() if _IDENTITY_FILES.fullmatch(path.name))
    try:
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in small}
    except OSError as error:
        raise CheckpointError(
            f"can't read `{error.filename}`: {error.strerror}", "is it a complete model directory?"
        ) from error
    parts: dict[str, Any] = {
        "revision": model.revision,
        "files": files,
        "shards": {},
    }
    for shard in sorted(set(shard_names(model).values())):
        path = model.path / shard
        if model.repo is None or path.is_file():
            header, _ = read_header(shard_path(model, shard))
            parts["shards"][shard] = [path.stat().st_size, header]
        else:
            parts["shards"][shard] = None
    return hashlib.sha256(canonical_json(parts)).hexdigest()
