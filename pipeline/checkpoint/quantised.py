"""Quantised vision weights: FP8 ones are joined with their scales, all others are refused.

The value of an FP8 weight is the stored number times its factor, whether the factors are called
`weight_scale` (compressed-tensors, ModelOpt) or `weight_scale_inv` (DeepSeek, Qwen): one for the
tensor, one per output row, or one per block of `quantization_config.weight_block_size`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.checkpoint.headers import Scale, TensorPlace
from pipeline.checkpoint.model import Model, first_names
from pipeline.errors import CheckpointError

FLOATS = ("F32", "BF16", "F16")
_FP8 = ("F8_E4M3", "F8_E5M2")
_SCALES = ("_scale", "_scale_inv")  # after the weight's own name
# beside an FP8 weight, and of no use to a tower that computes in full precision
_OF_ACTIVATIONS = ("input_scale", "output_scale", "activation_scale")
_BESIDES = re.compile(
    r"\.(weight_scale\w*|\w+_global_scale|weight_shape|weight_zero_point|input_scale|scales|SCB)$"
    r"|\.weight\."
)
# the first that fits a tensor's name in the tower names the format
_FORMATS = (
    (r"\.weight_global_scale$", "NVFP4 of compressed-tensors"),
    (r"\.weight_scale_2$", "NVFP4 of ModelOpt"),
    (r"\.weight_packed$", "packed integers of compressed-tensors"),
    (r"\.(qweight|qzeros|g_idx)$", "AWQ or GPTQ"),
    (r"\.(SCB|weight\.(absmax|quant_map|nested_\w+|quant_state\.\w+))$", "bitsandbytes"),
)


def join_scales(model: Model, places: Mapping[str, TensorPlace]) -> dict[str, TensorPlace]:
    """The tower's tensors by name, each FP8 weight with its factors.

    Raises CheckpointError naming the format and the first tensors of what can't be read as plain
    numbers.
    """
    for pattern, what in _FORMATS:
        if any(re.search(pattern, name) for name in places):
            raise _refused(model, what, _quantised_names(places))
    eights = [name for name, place in places.items() if place.dtype in _FP8]
    weights = [name for name in eights if not name.endswith(_SCALES)]
    sizes = _block_sizes(model.config)
    joined, used = dict(places), set[str]()
    for name in weights:
        scales = [name + end for end in _SCALES if name + end in places]
        if len(scales) != 1:
            what = "FP8 with two scales" if scales else "FP8 without a scale"
            raise _refused(model, what, [name, *scales])
        scale = _scale(places[name], places[scales[0]], sizes)
        if scale is None:
            raise _refused(model, _odd_scale(places[name], places[scales[0]]), [name, scales[0]])
        joined[name] = replace(places[name], scale=scale)
        module = name.rpartition(".")[0]
        used |= {scales[0], *(f"{module}.{ending}" for ending in _OF_ACTIVATIONS)}
    joined = {name: place for name, place in joined.items() if name not in used}
    _require_numbers(model, joined)
    return joined


def _scale(
    weight: TensorPlace, scale: TensorPlace, sizes: Sequence[tuple[int, int]]
) -> Scale | None:
    """Which factor is whose; None where the shapes leave that open."""
    rows, columns = weight.matrix
    shape = scale.shape
    if scale.dtype not in FLOATS:
        return None
    if all(side == 1 for side in shape):
        return Scale(scale, (1, 1), (rows, columns))
    if shape[0] == rows and all(side == 1 for side in shape[1:]):
        return Scale(scale, (rows, 1), (1, columns))
    fitting = [block for block in sizes if shape == (-(-rows // block[0]), -(-columns // block[1]))]
    if len(weight.shape) == 2 and len(fitting) == 1:
        return Scale(scale, (shape[0], shape[1]), fitting[0])
    return None


def _odd_scale(weight: TensorPlace, scale: TensorPlace) -> str:
    return (
        f"FP8 of shape {list(weight.shape)} with {scale.dtype} scales of shape "
        f"{list(scale.shape)}, which fit no block size of config.json"
    )


def _block_sizes(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(rows, columns) of a block, wherever config.json gives them; each once."""
    settings = quantisation(config)
    given = [settings.get("weight_block_size")]
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            given += [weights.get("block_structure"), [1, weights.get("group_size")]]
    sizes = dict.fromkeys(
        (each[0], each[1])
        for each in given
        if isinstance(each, list) and len(each) == 2
        and all(type(side) is int and side > 0 for side in each)
    )  # fmt: skip
    return list(sizes)


def quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What config.json says of the quantisation; empty where it says nothing."""
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, Mapping) else {}):
        for name in ("quantization_config", "compression_config"):
            settings = holder.get(name)
            if isinstance(settings, Mapping):
                return settings
    return {}


def quantisation_name(config: Mapping[str, Any]) -> str | None:
    """Method and format, as config.json names them."""
    settings = quantisation(config)
    words = [settings.get("quant_method"), settings.get("format") or settings.get("quant_algo")]
    return " ".join(str(word) for word in words if word) or None


def _quantised_names(places: Mapping[str, TensorPlace]) -> list[str]:
    """Tensors that are no plain numbers, and those that only a quantised tensor has beside it."""
    return sorted(
        name
        for name, place in places.items()
        if (place.dtype not in FLOATS and place.scale is None)
        or _BESIDES.search(name)
        or any(name.endswith(end) and name.removesuffix(end) in places for end in _SCALES)
    )


def _require_numbers(model: Model, places: Mapping[str, TensorPlace]) -> None:
    """Refuse what is left of a quantised tower: other types, and scales of weights in full."""
    odd = _quantised_names(places)
    if odd:
        kinds = sorted({places[name].dtype for name in odd} - set(FLOATS))
        what = f"type {', '.join(kinds)}" if kinds else "scales beside plain weights"
        raise _refused(model, what, odd)


def _refused(model: Model, what: str, names: list[str]) -> CheckpointError:
    said = quantisation_name(model.config)
    said = f" (config.json: {said})" if said else ""
    return CheckpointError(
        f"vision tower of `{model.name}`: quantised vision weights, {what}{said}: "
        f"{first_names(names)}",
        "use a build whose vision tower is kept in 16 or 32 bits, or in FP8 with its scales",
    )
