"""A family's sizes, pixels and embeddings are those of transformers' own processor and model."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_qwen3_vl, write_json
from PIL import Image

from pipeline.checkpoint import Model, resolve_model
from pipeline.errors import CheckpointError
from pipeline.families import family_of
from pipeline.families.qwen_processor import CONTRACT
from pipeline.geometry import Placement
from pipeline.keys import cache_key

SIZES = [(1, 1), (5, 900), (31, 33), (64, 64), (100, 333), (333, 100), (450, 600), (1300, 1000)]


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3_vl(tmp_path_factory.mktemp("dense") / "qwen3-vl")


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3_vl(tmp_path_factory.mktemp("moe") / "qwen3-vl-moe", moe=True)


@pytest.fixture(params=["dense", "moe"])
def model(request: pytest.FixtureRequest) -> Model:
    return resolve_model(str(request.getfixturevalue(request.param)))


@pytest.fixture
def copied(dense: Path, tmp_path: Path) -> Path:
    return shutil.copytree(dense, tmp_path / "copied")


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def own_processor(model: Model) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(model.path)


def processor_changes(directory: Path, changes: dict[str, Any]) -> Model:
    path = directory / "preprocessor_config.json"
    settings = json.loads(path.read_text()) | changes
    write_json(path, {name: value for name, value in settings.items() if value is not None})
    return resolve_model(str(directory))


# ---------------------------------------------------------------- finding the family


def test_an_unknown_model_type_is_refused_by_name(copied: Path) -> None:
    write_json(copied / "config.json", {"model_type": "nanovlm"})
    with pytest.raises(CheckpointError) as error:
        family_of(resolve_model(str(copied)))
    assert error.value.message == "`copied` is of model type 'nanovlm', which is not supported"
    assert "qwen3_vl, qwen3_vl_moe" in error.value.hint


@pytest.mark.parametrize("model_type", ["deepseek_ocr", "dots_ocr", "gemma3"])
def test_a_known_type_that_can_not_be_served_is_refused_with_the_reason(
    copied: Path, model_type: str
) -> None:
    write_json(copied / "config.json", {"model_type": model_type})
    with pytest.raises(CheckpointError, match=f"{model_type}, which is not supported: "):
        family_of(resolve_model(str(copied)))


def test_expected_tensors_are_those_of_transformers(model: Model) -> None:
    family = family_of(model)
    with torch.device("meta"):
        tower = family.make_shell(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in tower.state_dict().items()}
    assert family.expected_shapes(model.config) == shapes


def test_settings_left_out_are_the_class_defaults() -> None:
    from transformers import Qwen3VLVisionConfig

    family = family_of(resolve_model())
    defaults = Qwen3VLVisionConfig()
    for name, value in family.vision_config({}).items():
        theirs = defaults.rope_parameters[name] if name == "rope_theta" else getattr(defaults, name)
        assert value == (list(theirs) if isinstance(theirs, tuple) else theirs), name


def test_row_width_has_the_deepstack_levels() -> None:
    """Qwen3-VL-2B: 2,048 wide with three levels."""
    config = {"vision_config": {"out_hidden_size": 2048}, "text_config": {"hidden_size": 2048}}
    family = family_of(resolve_model())
    assert family.row_width(config) == 8192
    assert family.text_hidden_size(config) == 2048


# ---------------------------------------------------------------- pixel budget


@pytest.mark.parametrize(
    ("changes", "budget"),
    [
        ({}, (1024, 1_048_576)),
        ({"size": {"shortest_edge": 2048, "longest_edge": 200_000}}, (2048, 200_000)),
        ({"size": None, "min_pixels": 4096, "max_pixels": 100_000}, (4096, 100_000)),
        ({"min_pixels": 4096}, (4096, 1_048_576)),
        ({"size": None}, (3136, 1_003_520)),
    ],
)
def test_the_budget_is_that_of_the_processor(
    copied: Path, changes: dict[str, Any], budget: tuple[int, int]
) -> None:
    model = processor_changes(copied, changes)
    found = family_of(model).encode_spec(model).geometry
    size = own_processor(model).size
    assert (found.min_pixels, found.max_pixels) == budget
    assert (size["shortest_edge"], size["longest_edge"]) == budget


def test_settings_inside_processor_config_go_first(copied: Path) -> None:
    """transformers 5 saves a processor in one file."""
    image = json.loads((copied / "preprocessor_config.json").read_text())
    image["size"] = {"shortest_edge": 1024, "longest_edge": 65_536}
    write_json(copied / "processor_config.json", {"image_processor": image})
    model = resolve_model(str(copied))
    assert family_of(model).encode_spec(model).geometry.max_pixels == 65_536
    assert own_processor(model).size["longest_edge"] == 65_536
    (copied / "preprocessor_config.json").unlink()
    assert family_of(model).encode_spec(model).geometry.max_pixels == 65_536


def test_an_override_takes_effect_and_changes_the_key(dense: Path) -> None:
    model = resolve_model(str(dense))
    spec = family_of(model).encode_spec(model, max_pixels=200_000)
    assert spec.geometry.place(3300, 2550).tokens * 32 * 32 <= 200_000
    plain = family_of(model).encode_spec(model)
    assert cache_key("p", spec, "t") != cache_key("p", plain, "t")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "CLIPImageProcessor"),
        ({"do_normalize": False}, "do_normalize"),
        ({"do_resize": False}, "do_resize"),
        ({"resample": 9}, "resample"),
    ],
)
def test_another_processor_is_refused(copied: Path, changes: dict[str, Any], what: str) -> None:
    model = processor_changes(copied, changes)
    with pytest.raises(CheckpointError) as error:
        family_of(model).encode_spec(model)
    assert error.value.message.endswith(f"not supported: {what}")


def test_a_processor_of_another_patch_size_is_refused(copied: Path) -> None:
    model = processor_changes(copied, {"patch_size": 14})
    with pytest.raises(CheckpointError, match="the image processor cuts patches"):
        family_of(model).encode_spec(model)


# ---------------------------------------------------------------- pixels


@pytest.mark.parametrize("resample", [2, 3])
@pytest.mark.parametrize("size", SIZES)
def test_resized_pixels_are_those_of_the_processor(
    copied: Path, size: tuple[int, int], resample: int
) -> None:
    model = processor_changes(copied, {"resample": resample})
    family = family_of(model)
    spec = family.encode_spec(model)
    page, processor = noise(*size), own_processor(model)
    resized = family.resize(page, spec.geometry.place(*size), spec)
    original = processor(images=[Image.fromarray(page)], return_tensors="pt")
    again = processor(images=[Image.fromarray(resized)], do_resize=False, return_tensors="pt")
    assert torch.equal(original["pixel_values"], again["pixel_values"])
    assert original["image_grid_thw"].tolist() == [list(spec.geometry.place(*size).grid)]


def test_golden_pixels() -> None:
    """When this digest changes, other pixels are made of the same page: raise CONTRACT."""
    model = resolve_model()
    family = family_of(model)
    spec = family.encode_spec(model)
    columns = np.arange(300, dtype=np.int64)
    page = (columns[None, :, None] * 7 + columns[:200, None, None] * 13) % 251
    page = (page * np.array([1, 2, 3])[None, None, :] % 256).astype(np.uint8)
    resized = family.resize(page, Placement(192, 288, 54), spec)
    digest = hashlib.sha256(resized.tobytes()).hexdigest()
    assert (CONTRACT, digest[:32]) == (1, "d4250d84e8152ed0ce1cee14287990fe")


# ---------------------------------------------------------------- embeddings


def reference(model: Model, page: np.ndarray) -> torch.Tensor:
    """The embedding as transformers' whole model makes it of the original page, float32."""
    from checkpoints import load_weights
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(model.path)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    vision = {
        name.removeprefix("model.visual."): tensor.float()
        for name, tensor in load_weights(model.path).items()
        if name.startswith("model.visual.")
    }
    whole.model.visual.load_state_dict(vision, strict=True)
    inputs = own_processor(model)(images=[Image.fromarray(page)], return_tensors="pt")
    with torch.no_grad():
        out = whole.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    levels = [torch.cat(tuple(level)) for level in out.deepstack_features]
    return torch.cat([torch.cat(tuple(out.pooler_output)), *levels], dim=1)


@pytest.mark.parametrize("size", [(40, 50), (333, 100), (450, 600)])
def test_embeddings_are_those_of_the_whole_model(model: Model, size: tuple[int, int]) -> None:
    family = family_of(model)
    spec = family.encode_spec(model)
    page = noise(*size)
    tower = family.load_tower(model)
    rows = tower.encode(family.resize(page, spec.geometry.place(*size), spec))
    expected = reference(model, page)
    assert rows.dtype == torch.float32
    assert rows.shape == (
        spec.geometry.place(*size).tokens,
        family.row_width(model.config),
    )
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)


def test_each_part_of_an_embedding_depends_on_the_page(model: Model) -> None:
    """Main rows and both DeepStack levels differ between pages, and from each other."""
    family = family_of(model)
    tower = family.load_tower(model)
    one, two = (tower.encode(noise(64, 64, seed)) for seed in (1, 2))
    width = family.text_hidden_size(model.config)
    for part in range(3):
        columns = slice(part * width, (part + 1) * width)
        assert (one[:, columns] - two[:, columns]).abs().mean() > 0.01
    assert not torch.allclose(one[:, :width], one[:, width : 2 * width])


def test_an_embedding_does_not_depend_on_the_pages_before(model: Model) -> None:
    family = family_of(model)
    tower = family.load_tower(model)
    first = tower.encode(noise(96, 64, 1))
    tower.encode(noise(320, 320, 2))
    assert torch.equal(tower.encode(noise(96, 64, 1)), first)
    assert torch.equal(family.load_tower(model).encode(noise(96, 64, 1)), first)


BAD_SETTINGS = [
    ("config.json", {"model_type": ["qwen3_vl"]}, "not supported"),
    ("config.json", {"vision_config": [1]}, "vision_config is no JSON object"),
    ("config.json", {"vision_config": {"depth": "x"}}, "vision_config: depth can't be 'x'"),
    ("config.json", {"vision_config": {"depth": 10**9}}, "depth can't be 1000000000"),
    ("config.json", {"vision_config": {"depth": True}}, "depth can't be True"),
    ("config.json", {"vision_config": {"deepstack_visual_indexes": 5}}, "can't be 5"),
    ("config.json", {"vision_config": {"rope_parameters": {"rope_theta": "x"}}}, "rope_theta"),
    ("config.json", {"text_config": None}, "text_config is no JSON object"),
    ("preprocessor_config.json", {"size": "x"}, "size can't be 'x'"),
    ("preprocessor_config.json", {"size": {}}, "size has no shortest_edge"),
    ("preprocessor_config.json", {"min_pixels": "x"}, "size has no shortest_edge"),
    ("preprocessor_config.json", {"resample": [3]}, "resample can't be"),
    ("preprocessor_config.json", {"image_mean": [0.5]}, "image_mean can't be"),
    ("preprocessor_config.json", {"image_std": ["a"] * 3}, "image_std can't be"),
    ("preprocessor_config.json", {"rescale_factor": float("nan")}, "rescale_factor can't be nan"),
    ("processor_config.json", {"image_processor": 5}, "is no JSON object"),
]


@pytest.mark.parametrize(("name", "changes", "message"), BAD_SETTINGS)
def test_settings_that_can_not_be_meant_are_refused(
    copied: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    found = json.loads((copied / name).read_text()) if (copied / name).exists() else {}
    write_json(copied / name, found | changes)
    model = resolve_model(str(copied))
    with pytest.raises(CheckpointError) as error:
        family = family_of(model)
        family.encode_spec(model)
        family.row_width(model.config)
        family.text_hidden_size(model.config)
    assert message in error.value.message


def test_a_tower_that_transformers_refuses_is_an_error(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    config["vision_config"]["num_heads"] = 0
    write_json(copied / "config.json", config)
    model = resolve_model(str(copied))
    with pytest.raises(CheckpointError, match="transformers can't build its vision tower"):
        family_of(model).load_tower(model)
