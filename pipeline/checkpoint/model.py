"""Find a model: a local directory, the bundled one, or one of the hub."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError, MissingExtraError, UsageError
from pipeline.models import BUNDLED_NAME, BUNDLED_PATH

_INDEX = "model.safetensors.index.json"
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Model:
    """A model directory; `repo` and `revision` (resolved commit) are set for one of the hub."""

    path: Path
    name: str
    config: Mapping[str, Any] = field(repr=False, hash=False, compare=False)
    repo: str | None = None
    revision: str | None = None


def resolve_model(model: str | None = None, revision: str | None = None) -> Model:
    """The model in a local directory, of a hub id, or (None) the bundled one.

    Of a hub model only the small files are fetched here, a shard when its tensors are read.
    Raises CheckpointError where there is no such model.
    """
    if model is not None and not os.path.isdir(model):
        return _hub_model(model, revision)
    if revision is not None:
        raise UsageError("`--revision` is for hub models", "leave it out for a local directory")
    path = BUNDLED_PATH if model is None else Path(model)
    name = BUNDLED_NAME if model is None else path.resolve().name
    name = name.encode("utf-8", "backslashreplace").decode()  # it stands in JSON and in entries
    return Model(path, name, read_json(path / "config.json"))


def _hub_model(model: str, revision: str | None) -> Model:
    if not _HUB_ID.fullmatch(model) or model.startswith(".") or os.path.exists(model):
        raise CheckpointError(
            f"no model directory `{model}`", "give a directory that holds config.json, or a hub id"
        )
    hub = _hub_client()
    try:
        path = hub.snapshot_download(
            model, revision=revision, allow_patterns=list(_SMALL_FILES), ignore_patterns=["*/*"]
        )
    except Exception as error:  # the client raises a dozen types for no network, no such model, …
        raise CheckpointError(
            f"can't fetch `{model}` from the hub: {first_line(error)}", _hub_hint(hub)
        ) from error
    root = Path(path)
    return Model(root, model, read_json(root / "config.json"), repo=model, revision=root.name)


def _hub_client() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        hint = "pip install huggingface_hub"
        raise MissingExtraError("hub models need `huggingface_hub`", hint) from error
    return huggingface_hub


def _hub_hint(hub: Any) -> str:
    if hub.constants.HF_HUB_OFFLINE:
        return "unset HF_HUB_OFFLINE, or give the directory of a downloaded model"
    return "check the name and the network, or download it and give its directory"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model directory; raises CheckpointError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"`{path.parent}` has no {path.name}", "is it a complete model directory?"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"can't read `{path}`: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"`{path}` holds no JSON object")
    return value


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def first_names(names: Sequence[str]) -> str:
    """The first three, and how many there are besides."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def weight_map(model: Model) -> dict[str, str]:
    """Tensor name → shard, as the index has it; empty where there is no index."""
    path = model.path / _INDEX
    if not path.is_file():
        return {}
    shards = read_json(path).get("weight_map")
    if not isinstance(shards, dict):
        raise CheckpointError(f"`{path}` has no weight_map")
    return {str(name): str(shard) for name, shard in shards.items()}


def shard_path(model: Model, shard: str) -> Path:
    """Where a shard lies; one of a hub model is fetched if it is not there yet."""
    if Path(shard).name != shard:
        raise CheckpointError(f"the index of `{model.name}` names {shard!r}, which is no file name")
    path = model.path / shard
    if os.path.isfile(path):
        return path
    if model.repo is None:
        raise CheckpointError(
            f"`{model.path}` has no {shard}", "the checkpoint is incomplete: fetch it again"
        )
    hub = _hub_client()
    try:
        return Path(hub.hf_hub_download(model.repo, shard, revision=model.revision))
    except Exception as error:  # as in `_hub_model`
        raise CheckpointError(
            f"can't fetch {shard} of `{model.repo}`: {first_line(error)}", _hub_hint(hub)
        ) from error


@functools.lru_cache
def repository_files(model: Model, suffix: str) -> tuple[str, ...]:
    """Files of a hub model that end so, not in folders; none of a local one, or offline."""
    if model.repo is None:
        return ()
    hub = _hub_client()
    try:
        names = hub.list_repo_files(model.repo, revision=model.revision)
    except Exception:  # no network: what is in the local cache must do
        return ()
    return tuple(name for name in names if name.endswith(suffix) and "/" not in name)


@functools.lru_cache
def repository_tensors(model: Model, shard: str) -> tuple[str, ...]:
    """Names of the tensors in a hub model's file, of which only the header is fetched."""
    hub = _hub_client()
    try:
        header = hub.HfApi().parse_safetensors_file_metadata(
            model.repo, shard, revision=model.revision
        )
    except Exception as error:  # as in `_hub_model`
        raise CheckpointError(
            f"can't look into {shard} of `{model.repo}`: {first_line(error)}", _hub_hint(hub)
        ) from error
    return tuple(header.tensors)
