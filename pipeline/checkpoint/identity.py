"""Digests of a model: of the tower that encodes, and of what decides the answers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from pipeline.checkpoint.files import weight_files
from pipeline.checkpoint.headers import TensorPlace, read_header
from pipeline.checkpoint.model import Model
from pipeline.checkpoint.read import tensor_bytes
from pipeline.checkpoint.weights import WeightLayout, vision_places
from pipeline.errors import CheckpointError
from pipeline.keys import canonical_json

_IDENTITY_FILES = re.compile(
    r"config\.json|generation_config\.json|tokenizer.*|vocab\..*|merges\.txt|added_tokens\.json"
    r"|special_tokens_map\.json|chat_template.*|processor_config\.json"
)


def tower_fingerprint(
    model: Model, layout: WeightLayout, places: Mapping[str, TensorPlace] | None = None
) -> str:
    """sha256 (64 hex) over the tower's settings and the names, types, shapes and bytes of its
    tensors; the same however the checkpoint is sharded, prefixed or quantised elsewhere.

    An FP8 tensor counts as it is stored, with its scale: never the same as one in full precision,
    whose values native vLLM would compute with otherwise. `places` are those of `vision_places`,
    if they are known.
    """
    places = vision_places(model, layout) if places is None else places
    table = [[name, *_form(place)] for name, place in places.items()]
    head = {"config": layout.vision_config(model.config), "tensors": table}
    digest = hashlib.sha256(canonical_json(head))
    for place in places.values():
        for part in [place] if place.scale is None else [place, place.scale.place]:
            for piece in tensor_bytes(model, part):
                digest.update(piece)
    return digest.hexdigest()


def _form(place: TensorPlace) -> list[Any]:
    form: list[Any] = [place.dtype, list(place.shape)]
    if place.scale is not None:
        scale = place.scale
        form.append([scale.place.dtype, list(scale.grid), list(scale.block)])
    return form


def model_identity(model: Model) -> str:
    """sha256 (64 hex) of what decides the model's answers, without reading the weights.

    Config, generation config, tokenizer, chat template; each shard's name, size and header. The
    shards of a hub model count by name: its commit decides what they hold, fetched or not. So
    does a shard that the index names and that is not there.
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
    for shard in weight_files(model):
        path = model.path / shard
        parts["shards"][shard] = None
        if model.repo is None and path.is_file():
            header, _ = read_header(path)
            parts["shards"][shard] = [path.stat().st_size, header]
    return hashlib.sha256(canonical_json(parts)).hexdigest()
