"""Which files of a model hold its vision tensors: what the index says, checked by the headers.

An index may be stale: it lists a tensor whose shard lacks it, a shard that is not there, or not
all files. The headers decide. Files are looked into in three ranks, and a rank only while
something is missing: those that the index gives vision tensors, its other shards, and files that
it does not know. Without an index every file of the directory is of the first rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from pipeline.checkpoint.headers import TensorPlace, read_places
from pipeline.checkpoint.model import (
    Model,
    first_names,
    repository_files,
    repository_tensors,
    shard_path,
    weight_map,
)
from pipeline.errors import CheckpointError

WeightName = Callable[[str], str | None]


@dataclass(slots=True)
class Found:
    """Vision tensors seen so far: name in the tower → places, more than one where it stands twice.

    `listed` is what the index says of vision tensors: stored name → shard.
    """

    listed: dict[str, str]
    places: dict[str, list[TensorPlace]] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)

    @property
    def unseen(self) -> list[str]:
        """Stored names that the index lists and no header has had yet."""
        seen = {place.stored_name for places in self.places.values() for place in places}
        return sorted(self.listed.keys() - seen)


def find_tensors(model: Model, weight_name: WeightName, expected: Collection[str]) -> Found:
    """The vision tensors of a model, from the headers of as few files as hold them.

    `expected` are names in the tower, empty where they are not known. Raises CheckpointError
    where the index lists a tensor that no file has.
    """
    index = weight_map(model)
    found = Found({name: shard for name, shard in index.items() if weight_name(name) is not None})
    for rank in _ranks(model, index, found.listed):
        known = set(found.places)
        for shard in rank:
            for place in _vision_places(model, shard, weight_name, found):
                name = weight_name(place.stored_name)
                if name is not None and name not in known:  # a rank adds, it replaces nothing
                    found.places.setdefault(name, []).append(place)
        if found.places and not found.unseen and found.places.keys() >= set(expected):
            break
    _require_listed(model, weight_name, found)
    return found


def weight_files(model: Model) -> list[str]:
    """Names of the files that make the model: the index's, or all of the directory."""
    return sorted(set(weight_map(model).values())) or _unlisted(model)


def fetch_weights(model: Model) -> None:
    """Fetch every file of a hub model: an engine needs them all, the encoder only some."""
    if model.repo is not None:
        for shard in weight_files(model):
            shard_path(model, shard)


def _ranks(model: Model, index: dict[str, str], listed: dict[str, str]) -> Iterator[list[str]]:
    if not index:
        yield _unlisted(model)
        return
    first = set(listed.values())
    yield sorted(first)
    yield sorted(set(index.values()) - first)
    yield sorted(set(_unlisted(model)) - set(index.values()))


def _unlisted(model: Model) -> list[str]:
    here = [path.name for path in model.path.glob("*.safetensors")]
    return sorted({*here, *repository_files(model, ".safetensors")})


def _vision_places(
    model: Model, shard: str, weight_name: WeightName, found: Found
) -> list[TensorPlace]:
    """Vision tensors of one file; of the hub's, it is fetched only if it holds any."""
    if not (model.path / shard).is_file():
        if model.repo is None:
            found.absent.append(shard)
            return []
        promised = shard in found.listed.values()
        names = () if promised else repository_tensors(model, shard)
        if not promised and all(weight_name(name) is None for name in names):
            return []
    places = read_places(shard_path(model, shard)).values()
    return [place for place in places if weight_name(place.stored_name) is not None]


def _require_listed(model: Model, weight_name: WeightName, found: Found) -> None:
    """Raise for a tensor that only the index has; its name may be one of two for the same."""
    missing = [name for name in found.unseen if weight_name(name) not in found.places]
    if not missing:
        return
    name, shard = missing[0], found.listed[missing[0]]
    if shard in found.absent:
        there = [each for each in missing if found.listed[each] == shard]
        raise CheckpointError(
            f"`{model.path}` has no {shard}, which holds {first_names(there)} by the index",
            "the checkpoint is incomplete: fetch it again",
        )
    raise CheckpointError(
        f"{shard} has no tensor {name}, though the index says so, and no other file has it",
        "the checkpoint is incomplete: fetch it again",
    )
