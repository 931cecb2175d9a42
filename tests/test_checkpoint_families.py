"""Every family's tower is found in every layout, and loads from FP8."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import makers_glm
import makers_prompt
import makers_qwen
import makers_tiled
import numpy as np
import pytest
import torch
from checkpoint_layouts import fp8_tower, quantised_text, tower_alone
from checkpoints import load_weights, make_qwen3_vl, save_weights

from pipeline.checkpoint import resolve_model, tower_fingerprint
from pipeline.cli.model import facts_of
from pipeline.families import _MODULES, family_of


def make_qwen3_vl_moe(directory: Path) -> Path:
    return make_qwen3_vl(directory, moe=True)


MAKERS: dict[str, Callable[[Path], Path]] = {
    "qwen3_vl": make_qwen3_vl,
    "qwen3_vl_moe": make_qwen3_vl_moe,
}
for module in (makers_glm, makers_prompt, makers_qwen, makers_tiled):
    MAKERS |= {n.removeprefix("make_"): m for n, m in vars(module).items() if n.startswith("make_")}

PAGE = np.random.default_rng(0).integers(0, 256, (96, 128, 3), np.uint8)


@pytest.fixture(scope="module", params=sorted(MAKERS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that no test changes."""
    directory: Path = tmp_path_factory.mktemp(request.param) / "model"
    MAKERS[request.param](directory)
    return directory


def fingerprint(directory: Path) -> str:
    model = resolve_model(str(directory))
    return tower_fingerprint(model, family_of(model))


def embedding(directory: Path) -> torch.Tensor:
    model = resolve_model(str(directory))
    family = family_of(model)
    spec = family.encode_spec(model)
    placement = spec.geometry.place(*PAGE.shape[:2])
    rows = family.load_tower(model).encode(family.resize(PAGE, placement, spec))
    assert rows.shape == (placement.tokens, family.row_width(model.config))
    return rows


def test_every_model_type_has_a_maker() -> None:
    assert _MODULES.keys() <= MAKERS.keys()


def test_the_fingerprint_is_the_same_in_every_layout(made: Path, tmp_path: Path) -> None:
    before = fingerprint(made)
    for number, change in enumerate(
        (
            lambda copy: save_weights(copy, load_weights(copy), 1),
            lambda copy: save_weights(copy, load_weights(copy), 3),
            tower_alone,
            lambda copy: tower_alone(copy, index=False),
            lambda copy: quantised_text(copy, "awq"),
            lambda copy: quantised_text(copy, "nvfp4"),
        )
    ):
        copy = shutil.copytree(made, tmp_path / str(number))
        change(copy)
        assert fingerprint(copy) == before, number


def test_the_fingerprint_is_the_same_under_every_known_prefix(made: Path, tmp_path: Path) -> None:
    family = family_of(resolve_model(str(made)))
    before, weights = fingerprint(made), load_weights(made)
    known: tuple[tuple[str, str], ...] = getattr(family, "prefixes")  # noqa: B009
    for number, (prefix, ours) in enumerate(known):
        renamed = {}
        for name, tensor in weights.items():
            tower = family.weight_name(name) or ""
            other = prefix + tower.removeprefix(ours)
            moved = tower.startswith(ours) and family.weight_name(other) == tower
            renamed[other if tower and moved else name] = tensor
        copy = shutil.copytree(made, tmp_path / str(number))
        save_weights(copy, renamed, 2)
        assert any(name.startswith(prefix) for name in renamed)
        assert fingerprint(copy) == before, prefix


def test_an_fp8_tower_gives_nearly_the_embedding_of_the_full_one(
    made: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(made, tmp_path / "fp8")
    assert fp8_tower(copy, "channel")
    full, eight = embedding(made), embedding(copy)
    assert fingerprint(copy) != fingerprint(made)
    assert not torch.equal(full, eight)
    assert torch.cosine_similarity(full.float(), eight.float(), dim=1).min() > 0.9


def test_the_facts_of_every_family_are_shown(made: Path) -> None:
    facts = facts_of(str(made), None)
    model = resolve_model(str(made))
    family = family_of(model)
    assert facts["family"] == family.name
    assert facts["delivery"] == family.delivery
    assert facts["tower"]["fingerprint"] == fingerprint(made)
    weights = load_weights(made)
    ours = [tensor.numel() for name, tensor in weights.items() if family.weight_name(name)]
    assert facts["tower"]["parameters"] == sum(ours)
    geometry = family.encode_spec(model).geometry
    assert facts["a4"]["200"]["tokens"] == geometry.place(2339, 1654).tokens > 0
    assert ("run-batch" in facts["drivers"]) == (family.delivery != "prompt")
