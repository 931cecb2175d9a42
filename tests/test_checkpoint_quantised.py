"""Quantised builds: a tower in full precision loads as it is, an FP8 one exactly, no other ever."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_layouts import BLOCK, QUANTISED, change_config, fp8_tower, quantised, quantised_text
from checkpoints import load_weights, make_qwen3_vl, save_weights

from pipeline.checkpoint import resolve_model, tower_fingerprint, vision_places, vision_tensors
from pipeline.errors import CheckpointError
from pipeline.families import family_of

PREFIX = "model.visual."
QKV = "blocks.0.attn.qkv"  # (96, 32)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that no test changes."""
    return make_qwen3_vl(tmp_path_factory.mktemp("made") / "qwen3-vl")


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """A checkpoint that the test may change."""
    return shutil.copytree(made, tmp_path / "qwen3-vl")


def fingerprint(directory: Path) -> str:
    model = resolve_model(str(directory))
    return tower_fingerprint(model, family_of(model))


def tensors(directory: Path, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    model = resolve_model(str(directory))
    return vision_tensors(model, family_of(model), dtype)


def edit(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) take away tensors of the tower, by name in the tower."""
    weights = load_weights(directory) | {PREFIX + name: t for name, t in changes.items()}
    save_weights(directory, {n: t for n, t in weights.items() if t is not None}, 3)


def refusal(directory: Path) -> str:
    """The one message with which the fingerprint and the loading refuse a tower."""
    messages = set()
    for read in (fingerprint, tensors):
        with pytest.raises(CheckpointError) as error:
            read(directory)
        messages.add(error.value.message)
    assert len(messages) == 1
    return messages.pop()


# ---------------------------------------------------------------- text quantised, tower not


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_tower_kept_in_full_precision_is_that_of_the_unquantised_build(
    made: Path, copied: Path, kind: str
) -> None:
    quantised_text(copied, kind)
    stored = {tensor.dtype for tensor in load_weights(copied).values()}
    assert stored & {torch.int32, torch.int8, torch.uint8, torch.float8_e4m3fn}
    assert fingerprint(copied) == fingerprint(made)
    ours, theirs = tensors(copied), tensors(made)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_tower_in_another_float_type_is_read_as_it_is_stored(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    directory = make_qwen3_vl(tmp_path / "made", dtype=dtype)
    stored = load_weights(directory)
    for name, tensor in tensors(directory).items():
        assert tensor.dtype == dtype and torch.equal(tensor, stored[PREFIX + name])
    for name, tensor in tensors(directory, torch.float32).items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, stored[PREFIX + name].float())


# ---------------------------------------------------------------- FP8 tower


@pytest.mark.parametrize("kind", ["tensor", "channel", "block"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("ending", ["_scale", "_scale_inv"])
def test_fp8_weights_are_worth_their_values_times_their_scale(
    copied: Path, kind: str, dtype: torch.dtype, ending: str
) -> None:
    before = load_weights(copied)
    worth = fp8_tower(copied, kind, dtype=dtype, ending=ending)
    read = tensors(copied)
    assert {PREFIX + name for name in read} == {name for name in before if PREFIX in name}
    assert len(worth) == 15
    for name, tensor in read.items():
        stored = PREFIX + name
        expected = worth.get(stored, before[stored])
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), name
        near = torch.cosine_similarity(
            tensor.float().flatten(), before[stored].float().flatten(), 0
        )
        assert near > 0.99


def test_scales_in_sixteen_bits_and_one_dimension_are_taken(copied: Path) -> None:
    values = (torch.arange(96 * 32).reshape(96, 32) % 15 - 7).float()
    factors = (torch.arange(96).float() / 64 + 0.5).bfloat16()
    edit(
        copied,
        {
            f"{QKV}.weight": values.to(torch.float8_e4m3fn),
            f"{QKV}.weight_scale": factors,
        },
    )
    assert torch.equal(tensors(copied)[f"{QKV}.weight"], values * factors.float()[:, None])


def test_a_convolution_has_a_scale_for_each_output_channel(copied: Path) -> None:
    name = "patch_embed.proj.weight"
    shape = load_weights(copied)[PREFIX + name].shape  # (32, 3, 2, 16, 16)
    values = torch.randint(-7, 8, shape, generator=torch.Generator().manual_seed(0)).float()
    factors = torch.linspace(0.5, 1.5, 32)
    edit(copied, {name: values.to(torch.float8_e4m3fn), name + "_scale": factors[:, None]})
    assert torch.equal(tensors(copied)[name], values * factors.view(32, 1, 1, 1, 1))


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "fp8", "weight_block_size": [16, 24]},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"block_structure": [16, 24]}}},
        },
    ],
)
def test_the_block_size_is_found_where_each_format_keeps_it(
    copied: Path, settings: dict[str, object]
) -> None:
    worth = fp8_tower(copied, "block")
    change_config(copied, quantization_config=settings)
    read = tensors(copied)
    assert all(torch.equal(read[name.removeprefix(PREFIX)], worth[name]) for name in worth)


def test_scales_of_groups_along_a_row_are_taken(copied: Path) -> None:
    values = (torch.arange(96 * 32).reshape(96, 32) % 15 - 7).float()
    factors = torch.arange(96 * 4).reshape(96, 4).float() / 64 + 0.5
    edit(
        copied,
        {f"{QKV}.weight": values.to(torch.float8_e4m3fn), f"{QKV}.weight_scale": factors},
    )
    groups = {"group_0": {"weights": {"strategy": "group", "group_size": 8}}}
    change_config(copied, quantization_config={"config_groups": groups})
    expected = values.numpy() * np.kron(factors.numpy(), np.ones((1, 8), np.float32))
    assert np.array_equal(tensors(copied)[f"{QKV}.weight"].numpy(), expected)


def test_a_block_size_that_is_not_given_is_not_guessed(copied: Path) -> None:
    fp8_tower(copied, "block")
    for settings in ({"quant_method": "fp8"}, {"weight_block_size": [16, 32]}, None, {}, [16, 24]):
        change_config(copied, quantization_config=settings)
        message = refusal(copied)
        assert "FP8 of shape" in message and "fit no block size of config.json" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {f"{QKV}.weight_scale": None},
            f"quantised vision weights, FP8 without a scale (config.json: fp8): {QKV}.weight",
        ),
        (
            {f"{QKV}.weight_scale_inv": torch.ones(1)},
            "FP8 with two scales (config.json: fp8): "
            f"{QKV}.weight, {QKV}.weight_scale, {QKV}.weight_scale_inv",
        ),
        (
            {f"{QKV}.weight_scale": torch.ones(95)},
            "FP8 of shape [96, 32] with F32 scales of shape [95], which fit no block size",
        ),
        (
            {f"{QKV}.weight_scale": torch.ones(96, 1, dtype=torch.uint8)},
            "FP8 of shape [96, 32] with U8 scales of shape [96, 1]",
        ),
        (
            {f"{QKV}.weight": torch.ones(96, 32)},
            f"scales beside plain weights (config.json: fp8): {QKV}.input_scale, "
            f"{QKV}.weight_scale",
        ),
        (
            {f"{QKV}.bias": torch.ones(96).to(torch.float8_e4m3fn)},
            f"FP8 without a scale (config.json: fp8): {QKV}.bias",
        ),
    ],
)
def test_fp8_weights_that_can_not_be_scaled_are_refused(
    copied: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    fp8_tower(copied, "channel")
    edit(copied, changes)
    assert message in refusal(copied)


def test_an_fp8_tower_sees_what_the_full_one_sees(made: Path, copied: Path) -> None:
    fp8_tower(copied, "channel")
    rgb = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    rows = []
    for directory in (made, copied):
        model = resolve_model(str(directory))
        rows.append(family_of(model).load_tower(model).encode(rgb))
    assert not torch.equal(*rows)
    assert torch.cosine_similarity(*rows, dim=1).min() > 0.97


# ---------------------------------------------------------------- fingerprint


def test_an_fp8_tower_never_has_the_fingerprint_of_a_full_one(made: Path, tmp_path: Path) -> None:
    seen = {fingerprint(made)}
    for kind in ("tensor", "channel", "block"):
        copy = shutil.copytree(made, tmp_path / kind)
        worth = fp8_tower(copy, kind)
        seen.add(fingerprint(copy))
        names = [name for name in load_weights(copy) if name.endswith("_scale")]
        edit(copy, {n.removeprefix(PREFIX): None for n in names})
        edit(copy, {n.removeprefix(PREFIX): tensor for n, tensor in worth.items()})
        seen.add(fingerprint(copy))  # the same values, stored in full
    assert len(seen) == 7


def test_the_fingerprint_of_an_fp8_tower_is_of_weights_scales_and_blocks(
    made: Path, copied: Path, tmp_path: Path
) -> None:
    fp8_tower(copied, "block")
    again = shutil.copytree(made, tmp_path / "again")
    fp8_tower(again, "block", ending="_scale_inv", shards=1)
    before = fingerprint(copied)
    assert fingerprint(again) == before
    edit(copied, {f"{QKV}.input_scale": torch.tensor(0.25)})  # of no use to the tower
    assert fingerprint(copied) == before
    name = f"{QKV}.weight_scale"
    edit(copied, {name: load_weights(copied)[PREFIX + name] * 2})
    assert fingerprint(copied) != before


def test_another_block_size_for_the_same_scales_is_another_tower(copied: Path) -> None:
    fp8_tower(copied, "tensor")
    edit(copied, {f"{QKV}.weight_scale": torch.ones(6, 2)})  # blocks of 96 × 32 values
    seen = set()
    for block in ([16, 24], [17, 31]):
        change_config(copied, quantization_config={"weight_block_size": block})
        seen.add(fingerprint(copied))
    assert len(seen) == 2


# ---------------------------------------------------------------- towers that are refused

REFUSED = {
    "awq": (
        "AWQ or GPTQ (config.json: awq): "
        f"{QKV}.qweight, {QKV}.qzeros, {QKV}.scales"
    ),
    "gptq": (
        "AWQ or GPTQ (config.json: gptq): "
        f"{QKV}.g_idx, {QKV}.qweight, {QKV}.qzeros and 1 more"
    ),
    "auto-round": (
        "AWQ or GPTQ (config.json: auto-round): "
        f"{QKV}.g_idx, {QKV}.qweight, {QKV}.qzeros and 1 more"
    ),
    "nvfp4": (
        "NVFP4 of compressed-tensors (config.json: compressed-tensors nvfp4-pack-quantized): "
        f"{QKV}.input_global_scale, {QKV}.weight_global_scale, {QKV}.weight_packed and 1 more"
    ),
    "modelopt": (
        "NVFP4 of ModelOpt (config.json: modelopt NVFP4): "
        f"{QKV}.input_scale, {QKV}.weight, {QKV}.weight_scale and 1 more"
    ),
    "w4a16": (
        "packed integers of compressed-tensors (config.json: compressed-tensors pack-quantized): "
        f"{QKV}.weight_packed, {QKV}.weight_scale, {QKV}.weight_shape"
    ),
    "w8a8": (
        "type I8 (config.json: compressed-tensors int-quantized): "
        f"{QKV}.weight, {QKV}.weight_scale"
    ),
    "bitsandbytes": (
        "bitsandbytes (config.json: bitsandbytes): "
        f"{QKV}.weight, {QKV}.weight.absmax, {QKV}.weight.quant_map and 1 more"
    ),
    "bitsandbytes8": f"bitsandbytes (config.json: bitsandbytes): {QKV}.SCB, {QKV}.weight",
}  # fmt: skip


def test_every_quantised_format_but_fp8_has_its_refusal() -> None:
    assert REFUSED.keys() == QUANTISED.keys() - {"fp8"}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_quantised_tower_is_refused_by_format_and_first_tensors(copied: Path, kind: str) -> None:
    weight = load_weights(copied)[f"{PREFIX}{QKV}.weight"]
    edit(copied, {f"{QKV}.weight": None} | quantised(f"{QKV}.weight", weight, kind))
    change_config(copied, quantization_config=QUANTISED[kind])
    expected = f"vision tower of `qwen3-vl`: quantised vision weights, {REFUSED[kind]}"
    assert refusal(copied) == expected


def test_a_refusal_says_what_would_do(copied: Path) -> None:
    edit(copied, {f"{QKV}.weight": torch.ones(96, 32, dtype=torch.int8)})
    with pytest.raises(CheckpointError) as error:
        fingerprint(copied)
    assert error.value.message.endswith(f"quantised vision weights, type I8: {QKV}.weight")
    assert error.value.hint == (
        "use a build whose vision tower is kept in 16 or 32 bits, or in FP8 with its scales"
    )


def test_an_odd_quantization_config_changes_nothing_for_a_full_tower(copied: Path) -> None:
    before = fingerprint(copied)
    odd = [None, 3, "x", [], {"config_groups": 3}, {"config_groups": {"a": {"weights": 1}}},
           {"weight_block_size": ["a", 0]}, {"weight_block_size": [0, 128]}]  # fmt: skip
    for settings in odd:
        change_config(copied, quantization_config=settings)
        assert fingerprint(copied) == before


def test_places_tell_the_scale_of_each_fp8_weight(copied: Path) -> None:
    fp8_tower(copied, "block")
    model = resolve_model(str(copied))
    place = vision_places(model, family_of(model))[f"{QKV}.weight"]
    assert place.scale is not None
    assert (place.dtype, place.scale.grid, place.scale.block) == ("F8_E4M3", (6, 2), BLOCK)
    assert json.loads((copied / "config.json").read_text())["quantization_config"]
