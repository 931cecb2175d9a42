"""Only the vision tensors are read, all of them, and the fingerprint is theirs alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_layouts import INDEX, tower_alone
from checkpoints import load_weights, make_qwen3_vl, save_weights, write_json
from safetensors.torch import load_file, save_file

from pipeline.checkpoint import (
    Model,
    model_identity,
    resolve_model,
    tensor_problems,
    tower_fingerprint,
    vision_places,
    vision_tensors,
)
from pipeline.errors import CheckpointError, UsageError
from pipeline.families import family_of
from pipeline.models import BUNDLED_PATH

BIAS = "model.visual.blocks.0.norm1.bias"


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that no test changes."""
    return make_qwen3_vl(tmp_path_factory.mktemp("made") / "qwen3-vl")


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """A checkpoint that the test may change."""
    return shutil.copytree(made, tmp_path / "qwen3-vl")


def rewrite(directory: Path, changes: dict[str, torch.Tensor | None], shards: int = 3) -> None:
    """Write the weights again with some tensors replaced, added or (None) left out."""
    weights = load_weights(directory) | changes
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_weights(directory, kept, shards)


def fingerprint(directory: Path) -> str:
    model = resolve_model(str(directory))
    return tower_fingerprint(model, family_of(model))


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    model = resolve_model(str(directory))
    return vision_tensors(model, family_of(model))


def embedding(directory: Path) -> torch.Tensor:
    """Of a page of noise."""
    model = resolve_model(str(directory))
    rgb = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    return family_of(model).load_tower(model).encode(rgb)


# ---------------------------------------------------------------- finding the model


def test_no_name_is_the_bundled_model() -> None:
    model = resolve_model()
    assert (model.path, model.name, model.repo) == (BUNDLED_PATH, "tiny-reader", None)
    assert model.config["model_type"] == "qwen3_vl"


def test_a_directory_is_named_after_itself(made: Path) -> None:
    assert resolve_model(str(made)) == Model(made, "qwen3-vl", {})


@pytest.mark.parametrize("name", ["./missing", "missing", "../a/b", "a/b/c"])
def test_a_missing_directory_is_an_error_with_a_hint(name: str) -> None:
    with pytest.raises(CheckpointError) as error:
        resolve_model(name)
    assert error.value.message == f"no model directory `{name}`"
    assert error.value.hint == "give a directory that holds config.json, or a hub id"


def test_a_directory_without_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    for content in ("{", "[" * 100_000):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match="can't read"):
            resolve_model(str(tmp_path))


def test_a_file_or_an_impossible_name_is_no_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "x.gguf").write_text("")
    for name in ("models/x.gguf", "a" * 300):
        with pytest.raises(CheckpointError, match="no model directory"):
            resolve_model(name)


def test_a_directory_of_any_name_has_a_name_that_json_takes(made: Path, tmp_path: Path) -> None:
    os.symlink(made / "config.json", tmp_path / "config.json")
    odd = tmp_path.rename(tmp_path.parent / "odd-\udcff")
    assert resolve_model(str(odd)).name == "odd-\\udcff"
    odd.rename(tmp_path)


def test_a_revision_of_a_directory_is_a_usage_error(made: Path) -> None:
    with pytest.raises(UsageError, match="hub models"):
        resolve_model(str(made), "main")


# ---------------------------------------------------------------- vision tensors


def test_exactly_the_vision_tensors_are_read(made: Path) -> None:
    stored = {
        name.removeprefix("model.visual."): tensor
        for name, tensor in load_weights(made).items()
        if name.startswith("model.visual.")
    }
    read = tensors(made)
    assert read.keys() == stored.keys()
    assert all(torch.equal(read[name], stored[name]) for name in stored)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({BIAS: None}, "tensors missing: blocks.0.norm1.bias"),
        (
            {"model.visual.blocks.9.norm1.bias": torch.zeros(32)},
            "tensors left over: blocks.9.norm1.bias",
        ),
        (
            {BIAS: torch.zeros(31)},
            "tensors of another shape: blocks.0.norm1.bias [31] instead of [32]",
        ),
        (
            {"model.visual.blocks.0.attn.qkv.weight_scale": torch.ones(1)},
            "quantised vision weights, scales beside plain weights: blocks.0.attn.qkv.weight_scale",
        ),
        (
            {"model.visual.blocks.0.attn.proj.weight": torch.ones(32, 32, dtype=torch.int8)},
            "quantised vision weights, type I8: blocks.0.attn.proj.weight",
        ),
        ({"visual.blocks.0.norm1.bias": torch.zeros(32)}, "two tensors for blocks.0.norm1.bias"),
    ],
)
def test_wrong_vision_tensors_are_refused_by_name(
    copied: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    rewrite(copied, changes)
    for read in (fingerprint, tensors):
        with pytest.raises(CheckpointError) as error:
            read(copied)
        assert message in error.value.message


def test_quantised_text_weights_are_no_concern(copied: Path) -> None:
    before = fingerprint(copied)
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    rewrite(copied, {name: torch.ones(128, 64, dtype=torch.int8), name + "_scale": torch.ones(1)})
    assert fingerprint(copied) == before


def test_a_missing_or_cut_shard_is_named(copied: Path) -> None:
    shard = copied / "model-00002-of-00003.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors` is cut off"):
        fingerprint(copied)
    shard.write_bytes(data[:5])
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        fingerprint(copied)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"has no model-00002-of-00003\.safetensors"):
        fingerprint(copied)


def test_a_file_of_the_identity_that_can_not_be_read_is_named(copied: Path) -> None:
    (copied / "tokenizer.json").unlink(missing_ok=True)
    (copied / "tokenizer.json").symlink_to("gone")
    with pytest.raises(CheckpointError, match=r"can't read .*tokenizer\.json"):
        model_identity(resolve_model(str(copied)))


# ---------------------------------------------------------------- odd layouts


def edit_index(directory: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    """Put another weight map into the index."""
    path = directory / INDEX
    index = json.loads(path.read_text())
    write_json(path, index | {"weight_map": change(index["weight_map"])})


def test_a_tower_alone_on_its_shard_is_all_that_is_needed(copied: Path) -> None:
    before = fingerprint(copied)
    shard = tower_alone(copied)
    for path in copied.glob("*.safetensors"):
        if path.name != shard:
            path.unlink()
    assert fingerprint(copied) == before
    assert len(tensors(copied)) == len(load_weights(copied))


@pytest.mark.parametrize("name", ["model.safetensors", "tower.safetensors"])
def test_without_an_index_every_file_is_looked_into(copied: Path, name: str) -> None:
    before = fingerprint(copied)
    shard = tower_alone(copied, index=False)
    assert fingerprint(copied) == before
    (copied / shard).rename(copied / name)
    assert fingerprint(copied) == before


def test_an_index_that_names_the_wrong_shard_is_corrected_by_the_headers(copied: Path) -> None:
    before = fingerprint(copied)
    edit_index(copied, lambda shards: shards | {BIAS: other_than(shards[BIAS], shards)})
    assert fingerprint(copied) == before


def other_than(shard: str, shards: dict[str, str]) -> str:
    return next(each for each in sorted(shards.values()) if each != shard)


def test_an_index_that_sends_the_tower_to_a_text_shard_is_corrected(copied: Path) -> None:
    before, shard = fingerprint(copied), tower_alone(copied)
    edit_index(
        copied, lambda shards: {n: s.replace("00003-of", "00001-of") for n, s in shards.items()}
    )
    assert shard not in (copied / INDEX).read_text()
    assert fingerprint(copied) == before and tensors(copied).keys()


def test_an_index_that_does_not_know_the_tower_is_completed_by_a_stray_file(copied: Path) -> None:
    before, shard = fingerprint(copied), tower_alone(copied)
    (copied / shard).rename(copied / "vision.safetensors")
    edit_index(copied, lambda shards: {n: s for n, s in shards.items() if s != shard})
    assert fingerprint(copied) == before and tensors(copied).keys()


def test_a_tensor_that_the_index_forgot_is_found_on_the_shards_of_the_others(copied: Path) -> None:
    before = fingerprint(copied)
    edit_index(copied, lambda shards: {n: s for n, s in shards.items() if n != BIAS})
    assert fingerprint(copied) == before


def test_shards_that_are_not_there_are_no_concern_without_vision_tensors(copied: Path) -> None:
    before = fingerprint(copied), model_identity(resolve_model(str(copied)))
    edit_index(
        copied, lambda shards: shards | {"lm_head.weight": "model-00009-of-00009.safetensors"}
    )
    assert fingerprint(copied) == before[0]
    assert model_identity(resolve_model(str(copied))) != before[1]


def test_a_vision_tensor_that_moved_from_a_shard_that_is_gone_is_found(copied: Path) -> None:
    before = fingerprint(copied)
    edit_index(copied, lambda shards: shards | {BIAS: "model-00009-of-00009.safetensors"})
    assert fingerprint(copied) == before


def test_a_stray_copy_is_neither_read_nor_part_of_the_model(copied: Path) -> None:
    before = fingerprint(copied), model_identity(resolve_model(str(copied)))
    save_file({BIAS: torch.zeros(32)}, copied / "old.safetensors")
    (copied / "broken.safetensors").write_bytes(b"no header")
    assert (fingerprint(copied), model_identity(resolve_model(str(copied)))) == before


def test_the_shard_that_the_index_names_holds_the_tensor_that_counts(copied: Path) -> None:
    before = fingerprint(copied)
    index = json.loads((copied / INDEX).read_text())["weight_map"]
    other = copied / other_than(index[BIAS], index)
    save_file(load_file(other) | {BIAS: torch.zeros(32)}, other)
    assert fingerprint(copied) == before


def test_an_index_that_promises_too_much_is_refused(copied: Path) -> None:
    rewrite(copied, {BIAS: None})
    name = "model-00002-of-00003.safetensors"
    edit_index(copied, lambda shards: shards | {BIAS: name})
    expected = f"{name} has no tensor {BIAS}, though the index says so, and no other file has it"
    with pytest.raises(CheckpointError) as error:
        fingerprint(copied)
    assert error.value.message == expected


def test_an_index_that_lists_the_tower_under_both_prefixes_needs_only_one(copied: Path) -> None:
    before = fingerprint(copied)
    edit_index(copied, lambda shards: shards | {BIAS.removeprefix("model."): shards[BIAS]})
    assert fingerprint(copied) == before


def test_a_shard_that_is_gone_with_vision_tensors_is_named_with_them(copied: Path) -> None:
    shard = tower_alone(copied)
    (copied / shard).unlink()
    names = [
        f"model.visual.blocks.0.attn.{name}" for name in ("proj.bias", "proj.weight", "qkv.bias")
    ]
    expected = f"has no {shard}, which holds {', '.join(names)} and 42 more by the index"
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        fingerprint(copied)


def test_equal_copies_under_two_prefixes_are_one_tensor(copied: Path) -> None:
    before = fingerprint(copied)
    rewrite(copied, {"visual.blocks.0.norm1.bias": load_weights(copied)[BIAS]})
    assert fingerprint(copied) == before


def test_copies_that_differ_are_refused_with_both_names_and_files(copied: Path) -> None:
    rewrite(copied, {"visual.blocks.0.norm1.bias": load_weights(copied)[BIAS] * 2})
    with pytest.raises(CheckpointError) as error:
        fingerprint(copied)
    for part in ("two tensors for blocks.0.norm1.bias: ", BIAS, "visual.blocks.0.norm1.bias in "):
        assert part in error.value.message


def test_copies_in_files_without_an_index_are_refused_if_they_differ(copied: Path) -> None:
    rewrite(copied, {}, shards=1)
    before = fingerprint(copied)
    bias = load_weights(copied)[BIAS]
    save_file({BIAS: bias}, copied / "more.safetensors")
    assert fingerprint(copied) == before
    save_file({BIAS: -bias}, copied / "more.safetensors")
    message = "in model.safetensors and .* in more.safetensors, which differ"
    with pytest.raises(CheckpointError, match=message):
        fingerprint(copied)


def test_a_model_without_vision_tensors_or_without_weights_says_so(copied: Path) -> None:
    names = [name for name in load_weights(copied) if "visual" in name]
    rewrite(copied, dict.fromkeys(names))
    with pytest.raises(CheckpointError, match="has no vision tensors in its safetensors files"):
        fingerprint(copied)
    for path in copied.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="has no vision tensors in its safetensors files"):
        fingerprint(copied)


def test_an_index_that_leads_out_of_the_directory_is_refused(copied: Path) -> None:
    rewrite(copied, {}, shards=1)
    shutil.move(copied / "model.safetensors", copied.parent / "outside.safetensors")
    index = {name: "../outside.safetensors" for name in load_weights(copied.parent)}
    write_json(copied / INDEX, {"weight_map": index})
    with pytest.raises(CheckpointError, match=r"names '../outside.safetensors', which is no file"):
        fingerprint(copied)


class UnknownShapes:
    """A layout whose shapes only the module knows."""

    def weight_name(self, name: str) -> str | None:
        return name.removeprefix("model.visual.") if "visual" in name else None

    def expected_shapes(self, config: object) -> None:
        return None

    def vision_config(self, config: object) -> dict[str, Any]:
        return {}


def test_without_expected_shapes_all_vision_tensors_are_taken(copied: Path) -> None:
    rewrite(copied, {"model.visual.more": torch.zeros(3)})
    model = resolve_model(str(copied))
    places = vision_places(model, UnknownShapes())
    assert places["more"].shape == (3,)
    assert places.keys() == vision_tensors(model, UnknownShapes()).keys()
    assert len(tower_fingerprint(model, UnknownShapes())) == 64


def test_problems_of_tensors_are_told_by_name() -> None:
    expected = {"a": (1,), "b": (2, 3), "c": (4,), **{f"x{n}": (1,) for n in range(5)}}
    given = {"b": [3, 2], "c": torch.zeros(4).shape, "d": (1,)}
    assert tensor_problems(given, expected) == (
        "missing: a, x0, x1 and 3 more; left over: d; of another shape: b [3, 2] instead of [2, 3]"
    )
    assert tensor_problems(expected, expected) == ""


# ---------------------------------------------------------------- damage


BAD_HEADERS: list[Any] = [
    "x",
    None,
    {"data_offsets": [0, 4]},
    {"data_offsets": [-100, 28]},
    {"data_offsets": ["a", "b"]},
    {"data_offsets": [1, 2, 3]},
    {"data_offsets": [0.0, 128.0]},
    {"shape": 5},
    {"dtype": "F32"},
]


@pytest.mark.parametrize("change", BAD_HEADERS)
def test_a_damaged_header_is_named_with_its_tensor(copied: Path, change: Any) -> None:
    edit_header(copied, lambda entry: entry | change if isinstance(change, dict) else change)
    with pytest.raises(CheckpointError, match=f"the header is damaged at {BIAS}: "):
        fingerprint(copied)


@pytest.mark.parametrize("header", [b"[1]", b"[" * 100_000])
def test_a_header_that_is_no_object_is_refused(copied: Path, header: bytes) -> None:
    for shard in copied.glob("*.safetensors"):
        shard.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        fingerprint(copied)


@pytest.mark.parametrize("read", [fingerprint, tensors])
def test_offsets_that_overlap_or_leave_gaps_are_refused(
    copied: Path, read: Callable[[Path], object]
) -> None:
    def shifted(entry: dict[str, Any]) -> dict[str, Any]:
        return entry | {"data_offsets": [at + 2 for at in entry["data_offsets"]]}

    edit_header(copied, shifted)
    message = f"the header is damaged at {BIAS}: it starts at byte"
    with pytest.raises(CheckpointError, match=message):
        read(copied)


def test_bytes_after_the_last_tensor_are_refused(copied: Path) -> None:
    with open(copied / "model-00002-of-00003.safetensors", "ab") as stream:
        stream.write(b"12345")
    with pytest.raises(CheckpointError, match="has 5 bytes too many"):
        fingerprint(copied)


def edit_header(directory: Path, change: Callable[[Any], Any]) -> None:
    """Put something else where the header tells of `BIAS`."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    shard = directory / index["weight_map"][BIAS]
    data = shard.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header[BIAS] = change(header[BIAS])
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + data[start:])


# ---------------------------------------------------------------- fingerprint and identity


def test_sharding_and_prefix_do_not_change_the_fingerprint(made: Path, tmp_path: Path) -> None:
    single = make_qwen3_vl(tmp_path / "single", shards=1)
    old = make_qwen3_vl(tmp_path / "old", shards=5, prefix="visual.")
    assert fingerprint(made) == fingerprint(single) == fingerprint(old)
    ours, theirs = tensors(single), tensors(old)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(embedding(single), embedding(old))


def test_every_byte_and_setting_of_the_tower_changes_the_fingerprint(copied: Path) -> None:
    seen = {fingerprint(copied)}
    bias = load_weights(copied)[BIAS]
    changed = bias.clone()
    changed.view(torch.int16)[-1] ^= 1
    rewrite(copied, {BIAS: changed})
    seen.add(fingerprint(copied))
    rewrite(copied, {BIAS: bias.float()})
    seen.add(fingerprint(copied))
    rewrite(copied, {BIAS: bias})
    assert fingerprint(copied) in seen
    config = json.loads((copied / "config.json").read_text())
    config["vision_config"]["deepstack_visual_indexes"] = [0, 0]
    write_json(copied / "config.json", config)
    seen.add(fingerprint(copied))
    assert len(seen) == 4


def test_settings_of_the_text_model_do_not_change_the_fingerprint(copied: Path) -> None:
    before = fingerprint(copied), model_identity(resolve_model(str(copied)))
    config = json.loads((copied / "config.json").read_text())
    config["text_config"]["rms_norm_eps"] = 1e-5
    config["vision_config"]["initializer_range"] = 0.5
    write_json(copied / "config.json", config)
    assert fingerprint(copied) == before[0]
    assert model_identity(resolve_model(str(copied))) != before[1]


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "chat_template.jinja", "generation_config.json"]
)
def test_what_decides_answers_changes_the_identity(copied: Path, name: str) -> None:
    before = model_identity(resolve_model(str(copied)))
    (copied / "notes.md").write_text("not part of the model")
    assert model_identity(resolve_model(str(copied))) == before
    (copied / name).write_text((copied / name).read_text() + " ")
    assert model_identity(resolve_model(str(copied))) != before


def test_another_size_or_header_of_a_shard_changes_the_identity(copied: Path) -> None:
    before = model_identity(resolve_model(str(copied)))
    rewrite(copied, {}, shards=4)
    assert model_identity(resolve_model(str(copied))) != before


def test_the_fingerprint_needs_neither_torch_nor_transformers(made: Path) -> None:
    code = (
        "import sys\n"
        "from pipeline.checkpoint import resolve_model, tower_fingerprint, model_identity\n"
        "from pipeline.families import family_of\n"
        f"model = resolve_model({str(made)!r}); family = family_of(model)\n"
        "family.encode_spec(model); model_identity(model)\n"
        "print(tower_fingerprint(model, family))\n"
        "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == fingerprint(made), done.stderr
