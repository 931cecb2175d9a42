"""Bytes of tensors, in pieces: no shard is mapped, nothing lies in memory twice.

A mapped shard's pages would count as memory of this process, and a tensor read whole before it
is converted lies there twice. Here the peak is the tensors in the type that is asked for, and
one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.headers import VALUE_BYTES, TensorPlace
from pipeline.checkpoint.model import Model, first_line, shard_path
from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_PIECE_BYTES = 1 << 22


def tensor_bytes(model: Model, place: TensorPlace) -> Iterator[memoryview]:
    """The bytes of one tensor as stored, in pieces that each last until the next.

    A piece holds whole values. Raises CheckpointError where the file ends early or can't be read.
    """
    path = shard_path(model, place.shard)
    piece = memoryview(bytearray(min(_PIECE_BYTES, place.stop - place.start)))
    try:
        with open(path, "rb", buffering=0) as stream:
            stream.seek(place.start)
            left = place.stop - place.start
            while left:
                part = piece[: min(left, len(piece))]
                _fill(part, stream, path)
                left -= len(part)
                yield part
    except OSError as error:
        raise CheckpointError(f"can't read `{path}`: {first_line(error)}") from error


def _fill(part: memoryview, stream: Any, path: Path) -> None:
    done = 0
    while done < len(part):
        count = stream.readinto(part[done:])
        if not count:
            raise CheckpointError(f"`{path}` is cut off", "fetch it again")
        done += count


def same_bytes(model: Model, first: TensorPlace, second: TensorPlace) -> bool:
    """True if two tensors are of one type, shape and content."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    pieces = zip(tensor_bytes(model, first), tensor_bytes(model, second), strict=True)
    return all(one == other for one, other in pieces)


def read_tensors(
    model: Model, places: Mapping[str, TensorPlace], dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Tensors by tower name, as stored or in `dtype`; FP8 ones times their scale.

    An FP8 weight becomes float32 where no type is asked for.
    """
    in_file_order = sorted(places, key=lambda name: (places[name].shard, places[name].start))
    tensors = {name: _read(model, places[name], dtype) for name in in_file_order}
    return {name: tensors[name] for name in places}


def _read(model: Model, place: TensorPlace, dtype: torch.dtype | None) -> torch.Tensor:
    import torch

    stored = _torch_types()[place.dtype]
    wanted = dtype or (stored if place.scale is None else torch.float32)
    tensor = torch.empty(place.shape, dtype=wanted if place.scale is None else torch.float32)
    flat, done = tensor.view(-1), 0
    for piece in tensor_bytes(model, place):
        count = len(piece) // VALUE_BYTES[place.dtype]
        flat[done : done + count].copy_(torch.frombuffer(piece, dtype=stored))
        done += count
    if place.scale is not None:
        factors = _read(model, place.scale.place, torch.float32).view(place.scale.grid)
        _scale_rows(tensor.view(place.matrix), factors, place.scale.block)
    return tensor.to(wanted)


def _scale_rows(
    values: torch.Tensor,  # (rows, columns) float32, changed in place
    factors: torch.Tensor,  # (blocks of rows, blocks of columns) float32
    block: tuple[int, int],
) -> None:
    rows, columns = values.shape
    if factors.shape[1] == 1:
        values *= factors.repeat_interleave(block[0], dim=0)[:rows]
        return
    for number, row_of_factors in enumerate(factors):
        across = row_of_factors.repeat_interleave(block[1])[:columns]
        values[number * block[0] : (number + 1) * block[0]] *= across


def _torch_types() -> dict[str, torch.dtype]:
    import torch

    return {
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
    }
