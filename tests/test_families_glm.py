"""GLM-4V, GLM-OCR and PaddleOCR-VL: sizes, pixels and rows are transformers' own, or vLLM's."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import makers_glm
import numpy as np
import pytest
import torch
from checkpoints import load_weights, save_weights, write_json
from PIL import Image

from pipeline.checkpoint import Model, resolve_model, tower_fingerprint
from pipeline.errors import CheckpointError, UsageError
from pipeline.families import Delivery, family_of, glm4v, paddleocr_vl
from pipeline.geometry import AspectRatioError, EnlargingBudget, FrameBudget, PixelBudget
from pipeline.plugin import patches

GLM = ("glm4v", "glm_ocr")
TYPES = (*GLM, "paddleocr_vl")
SIZES = [(1, 1), (5, 900), (27, 29), (100, 333), (333, 100), (900, 620)]

Make = Callable[[str], Path]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    root, ready = tmp_path_factory.mktemp("glm"), {}

    def make(model_type: str) -> Path:
        if model_type not in ready:
            ready[model_type] = getattr(makers_glm, f"make_{model_type}")(root / model_type)
        return ready[model_type]

    return make


@pytest.fixture(params=TYPES)
def model(request: pytest.FixtureRequest, made: Make) -> Model:
    return resolve_model(str(made(request.param)))


@pytest.fixture
def copied(model: Model, tmp_path: Path) -> Path:
    return shutil.copytree(model.path, tmp_path / "copied")


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def change(path: Path, changes: dict[str, Any]) -> Model:
    """Set top-level settings of a model's JSON file; None removes one."""
    settings = json.loads(path.read_text()) | changes
    write_json(path, {name: value for name, value in settings.items() if value is not None})
    return resolve_model(str(path.parent))


def own_processor(model: Model) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(model.path)


def resized(model: Model, page: np.ndarray) -> np.ndarray:
    family = family_of(model)
    spec = family.encode_spec(model)
    return family.resize(page, spec.geometry.place(*page.shape[:2]), spec)


# ---------------------------------------------------------------- what a family says of itself


def test_vllm_takes_the_rows_with_their_grid_by_our_patches(model: Model) -> None:
    family = family_of(model)
    assert family.name == model.config["model_type"]
    assert family.delivery == Delivery.GRID
    assert family.modalities == (("image", "video") if family.name in GLM else ("image",))
    assert family.cpu_dtype is None
    assert family.patches and set(family.patches) <= set(patches.BY_MODULE)
    assert family.warnings(model) == ()
    assert (family.row_width(model.config), family.text_hidden_size(model.config)) == (64, 64)


def test_settings_left_out_are_the_class_defaults(model: Model) -> None:
    from transformers import CONFIG_MAPPING

    family = family_of(model)
    theirs = CONFIG_MAPPING[family.name]()
    ours = family.vision_config({})
    assert ours.pop("rope_theta") == theirs.vision_config.rope_parameters["rope_theta"]
    ours.pop("align_corners", None)
    assert ours == {name: getattr(theirs.vision_config, name) for name in ours}
    assert family.text_hidden_size({"text_config": {}}) == theirs.text_config.hidden_size


def test_expected_tensors_are_those_of_transformers(model: Model) -> None:
    family = family_of(model)
    with torch.device("meta"):
        shell = family.make_shell(model)
    shapes = {
        name.removeprefix(family.shell_prefix): tuple(tensor.shape)
        for name, tensor in shell.state_dict().items()
    }
    towers = {name: shape for name, shape in shapes.items() if name.startswith(tuple(family.parts))}
    assert family.expected_shapes(model.config) == towers


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("glm4v", {"hidden_size": 48, "vision_config": {}}),
        ("paddleocr_vl", {"hidden_size": 48, "vision_config": {}}),
        ("paddleocr_vl", {"text_config": {"hidden_size": 48}, "hidden_size": 5}),
    ],
)
def test_the_text_settings_may_stand_at_the_top_of_the_config(
    model_type: str, config: dict[str, Any], made: Make
) -> None:
    family = family_of(resolve_model(str(made(model_type))))
    assert family.text_hidden_size(config) == 48


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("model_type", ["glm4v", "paddleocr_vl"])
def test_pages_are_placed_by_the_processors_rule(model_type: str) -> None:
    from transformers.models.glm4v.image_processing_glm4v import smart_resize as of_glm
    from transformers.models.paddleocr_vl.image_processing_paddleocr_vl import (
        smart_resize as of_paddle,
    )

    draw = random.Random(0)
    for _ in range(4000):
        page = [draw.choice([draw.randint(1, 60), draw.randint(1, 4000)]) for _ in "hw"]
        limits = draw.choice([1, 12_544]), draw.choice([12_544, 300_000, 9_633_792])
        budget: PixelBudget = EnlargingBudget(14, 2, *limits)
        if model_type == "glm4v":
            budget = FrameBudget(14, 2, *limits, frames=2)
        try:
            place = budget.place(*page)
            found = (place.height_px, place.width_px)
            assert place.grid == (1, found[0] // 14, found[1] // 14)
            assert place.tokens == found[0] * found[1] // 28**2
        except AspectRatioError:
            found = (0, 0)
        try:
            if model_type == "glm4v":
                expected = of_glm(2, *page, 2, 28, *limits)
            else:
                expected = of_paddle(*page, 28, *limits)
        except ValueError:
            expected = (0, 0)
        assert found == expected, (page, budget)


def test_equal_numbers_of_another_rule_are_another_geometry() -> None:
    kinds = {
        asdict(budget)["kind"]
        for budget in (
            PixelBudget(14, 2, 1, 9000),
            EnlargingBudget(14, 2, 1, 9000),
            FrameBudget(14, 2, 1, 9000, frames=2),
        )
    }
    assert kinds == {"smart_resize", "enlarging_resize", "frame_resize"}


def test_a_budget_below_one_token_of_every_frame_is_refused() -> None:
    with pytest.raises(UsageError) as error:
        FrameBudget(14, 2, 1, 1000, frames=2)
    assert error.value.hint == "raise `--max-pixels` to at least 1568"


@pytest.mark.parametrize(
    ("model_type", "changes", "budget"),
    [
        ("glm4v", {}, (12_544, 300_000)),
        ("glm4v", {"min_pixels": 1, "max_pixels": 9_000}, (12_544, 300_000)),  # never read
        ("glm_ocr", {"size": None}, (12_544, 11_760_000)),
        ("paddleocr_vl", {}, (9_408, 200_000)),
        ("paddleocr_vl", {"min_pixels": None, "size": None}, (147_456, 200_000)),
        (
            "paddleocr_vl",
            {"max_pixels": None, "size": {"shortest_edge": 1, "longest_edge": 99_000}},
            (9_408, 99_000),
        ),
    ],
)
def test_the_budget_is_that_of_the_processor(
    model_type: str,
    changes: dict[str, Any],
    budget: tuple[int, int],
    made: Make,
    tmp_path: Path,
) -> None:
    copied = shutil.copytree(made(model_type), tmp_path / "copied")
    model = change(copied / "preprocessor_config.json", changes)
    geometry = family_of(model).encode_spec(model).geometry
    size = own_processor(model).size
    assert (geometry.min_pixels, geometry.max_pixels) == budget
    assert (size["shortest_edge"], size["longest_edge"]) == budget


def test_an_override_takes_effect(model: Model) -> None:
    family = family_of(model)
    spec = family.encode_spec(model, min_pixels=1, max_pixels=50_000)
    place = spec.geometry.place(1000, 800)
    frames = 2 if family.name in GLM else 1
    assert 40_000 < frames * place.height_px * place.width_px <= 50_000
    assert family.native_settings(spec) == {"size": {"shortest_edge": 1, "longest_edge": 50_000}}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"image_processor_type": "SiglipImageProcessor"}, "not supported: SiglipImageProcessor"),
        ({"do_normalize": False}, "not supported: do_normalize"),
        ({"merge_size": 1}, "the image processor cuts patches"),
        ({"min_pixels": None, "size": {"longest_edge": 50_000}}, "size has no shortest_edge"),
    ],
)
def test_another_processor_is_refused(copied: Path, changes: dict[str, Any], why: str) -> None:
    model = change(copied / "preprocessor_config.json", changes)
    with pytest.raises(CheckpointError, match=why):
        family_of(model).encode_spec(model)


# ---------------------------------------------------------------- pixels


@pytest.mark.parametrize("size", SIZES)
def test_resized_pixels_are_those_of_the_processor(model: Model, size: tuple[int, int]) -> None:
    page, processor = noise(*size), own_processor(model)
    original = processor(images=[Image.fromarray(page)], return_tensors="pt")
    again = processor(
        images=[Image.fromarray(resized(model, page))], do_resize=False, return_tensors="pt"
    )
    assert torch.equal(original["pixel_values"], again["pixel_values"])
    place = family_of(model).encode_spec(model).geometry.place(*size)
    assert original["image_grid_thw"].tolist() == [list(place.grid)]


@pytest.mark.parametrize("model_type", TYPES)
def test_golden_pixels(model_type: str, made: Make) -> None:
    """When this digest changes, other pixels are made of the same page: raise CONTRACT."""
    columns = np.arange(300, dtype=np.int64)
    page = (columns[None, :, None] * 7 + columns[:200, None, None] * 13) % 251
    page = (page * np.array([1, 2, 3])[None, None, :] % 256).astype(np.uint8)
    pixels = resized(resolve_model(str(made(model_type))), page)
    assert (glm4v.CONTRACT, paddleocr_vl.CONTRACT) == (1, 1)
    digest = hashlib.sha256(pixels.tobytes()).hexdigest()
    assert digest[:32] == "2c895205ac270c75a33eb909f840f0fb"


# ---------------------------------------------------------------- embeddings


def whole_model(model: Model) -> Any:
    """transformers' model with all weights, loaded by itself."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(model.path).float().eval()


def reference(model: Model, page: np.ndarray, whole: Any) -> torch.Tensor:
    inputs = own_processor(model)(images=[Image.fromarray(page)], return_tensors="pt")
    with torch.no_grad():
        out = whole.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    return torch.cat(tuple(out.pooler_output))


def interpolate_as_vllm(whole: Any) -> None:
    """Positions by the very call of vLLM's `SiglipVisionEmbeddings`, not by our switch."""
    from transformers.models.paddleocr_vl import modeling_paddleocr_vl as modeling

    def positions(self: Any, pixel_values: torch.Tensor, grid_thw: Any, **_: Any) -> torch.Tensor:
        patches = self.patch_embedding(pixel_values.flatten(0, 1)).flatten(1)  # (N, D)
        side = int(self.position_embedding.num_embeddings**0.5)
        table = self.position_embedding.weight.reshape(1, side, side, -1).permute(0, 3, 1, 2)
        ((_, height, width),) = grid_thw.tolist()
        table = torch.nn.functional.interpolate(
            table, size=(height, width), mode="bilinear", align_corners=False
        )
        return patches + table.permute(0, 2, 3, 1).reshape(height * width, -1)

    embeddings = whole.model.visual.vision_model.embeddings
    assert isinstance(embeddings, modeling.PaddleOCRVisionEmbeddings)
    embeddings.forward = positions.__get__(embeddings)


def test_embeddings_are_those_of_the_whole_model(model: Model) -> None:
    family, whole = family_of(model), whole_model(model)
    if family.name == "paddleocr_vl":
        interpolate_as_vllm(whole)
    spec, tower = family.encode_spec(model), family.load_tower(model)
    for size in ((40, 50), (333, 100), (450, 600)):
        page = noise(*size)
        rows = tower.encode(resized(model, page))
        assert rows.dtype == torch.float32
        assert rows.shape == (spec.geometry.place(*size).tokens, family.row_width(model.config))
        torch.testing.assert_close(rows, reference(model, page, whole), rtol=1e-5, atol=1e-5)
        assert torch.equal(rows, tower.encode_original(page, spec))


def test_transformers_own_positions_would_be_others(made: Make) -> None:
    """Else the switch of PaddleOCR-VL's interpolation would prove nothing."""
    model = resolve_model(str(made("paddleocr_vl")))
    page = noise(333, 100)
    rows = family_of(model).load_tower(model).encode(resized(model, page))
    theirs = reference(model, page, whole_model(model))
    assert torch.nn.functional.cosine_similarity(rows, theirs).min() < 0.9999


def test_embeddings_depend_on_the_page_and_on_the_place_on_it(model: Model) -> None:
    tower = family_of(model).load_tower(model)
    first, second = (tower.encode(resized(model, noise(200, 240, seed))) for seed in (1, 2))
    assert not torch.allclose(first, second, atol=1e-2)
    assert not torch.allclose(first[0], first[-1], atol=1e-2)


# ---------------------------------------------------------------- checkpoints


def test_prefixes_and_shards_change_neither_rows_nor_fingerprint(copied: Path) -> None:
    """As on the hub, and as transformers 5 writes it."""
    before = resolve_model(str(copied))
    family = family_of(before)
    page = noise(90, 70)
    expected = family.load_tower(before).encode(resized(before, page))
    fingerprint = tower_fingerprint(before, family)
    weights = load_weights(copied)
    hub = {"mlp_AR.": "model.projector.", "visual.": "model.visual."}
    if family.name in GLM:
        hub = {"model.visual.": "visual."}
    renamed = {
        next(
            (new + name.removeprefix(old) for old, new in hub.items() if name.startswith(old)), name
        ): tensor
        for name, tensor in weights.items()
    }
    assert renamed.keys() != weights.keys()
    save_weights(copied, renamed, shards=3)
    after = resolve_model(str(copied))
    assert tower_fingerprint(after, family) == fingerprint
    assert torch.equal(family.load_tower(after).encode(resized(after, page)), expected)


def test_a_missing_tensor_is_named(copied: Path) -> None:
    weights = load_weights(copied)
    name = next(
        name for name in weights if name.endswith(("merger.down_proj.weight", "linear_2.bias"))
    )
    del weights[name]
    save_weights(copied, weights, shards=1)
    model = resolve_model(str(copied))
    with pytest.raises(
        CheckpointError, match=f"missing: .*{name.rpartition('.')[0].split('.')[-1]}"
    ):
        family_of(model).load_tower(model)


def test_what_is_stored_and_used_by_nobody_is_left_alone(made: Make) -> None:
    model = resolve_model(str(made("paddleocr_vl")))
    family = family_of(model)
    assert "visual.vision_model.head.probe" in load_weights(model.path)
    table = "visual.vision_model.embeddings.packing_position_embedding.weight"
    assert family.weight_name("visual.vision_model.head.probe") is None
    assert family.weight_name(table) is None
    assert family.weight_name("mlp_AR.linear_1.weight") == "projector.linear_1.weight"
    assert family.weight_name("model.layers.0.mlp.up_proj.weight") is None


# ---------------------------------------------------------------- traps


def test_a_processor_without_its_normalisation_is_warned_of(copied: Path) -> None:
    model = change(copied / "preprocessor_config.json", {"image_mean": None, "image_std": None})
    (warning,) = family_of(model).warnings(model)
    assert warning.startswith("the image processor's JSON has no image_mean and no image_std")


def test_a_budget_that_glm_does_not_read_is_warned_of(made: Make, tmp_path: Path) -> None:
    copied = shutil.copytree(made("glm4v"), tmp_path / "copied")
    model = change(copied / "preprocessor_config.json", {"max_pixels": 9_000})
    (warning,) = family_of(model).warnings(model)
    assert warning == (
        "the image processor's JSON has max_pixels, which GLM's processor does not read: "
        "`size` decides"
    )


def test_settings_fixed_in_vllm_are_warned_of(made: Make, tmp_path: Path) -> None:
    copied = shutil.copytree(made("glm_ocr"), tmp_path / "copied")
    config = json.loads((copied / "config.json").read_text())
    config["vision_config"] |= {"rms_norm_eps": 1e-6}
    config["text_config"] |= {"intermediate_size": 128}
    model = change(copied / "config.json", config)
    epsilon, merger = family_of(model).warnings(model)
    assert epsilon.startswith("vision_config has rms_norm_eps 1e-06, vLLM's own tower computes")
    assert merger.startswith("the merger is 192 wide, vLLM's own takes text_config's intermediate")
