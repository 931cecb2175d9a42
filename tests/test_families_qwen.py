"""Qwen2-VL, Qwen2.5-VL and Qwen3.5: sizes, pixels and rows are transformers' own."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import makers_qwen
import numpy as np
import pytest
import torch
from checkpoints import load_weights, save_weights, write_json
from PIL import Image

from pipeline.checkpoint import Model, resolve_model, tower_fingerprint
from pipeline.errors import CheckpointError
from pipeline.families import Delivery, family_of

TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe")
SIZES = [(1, 1), (27, 29), (56, 84), (100, 333), (333, 100), (420, 310)]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, ready = tmp_path_factory.mktemp("qwen"), {}

    def make(model_type: str) -> Path:
        if model_type not in ready:
            maker = getattr(makers_qwen, f"make_{model_type}")
            ready[model_type] = maker(root / model_type)
        return ready[model_type]

    return make


@pytest.fixture(params=TYPES)
def model(request: pytest.FixtureRequest, made: Callable[[str], Path]) -> Model:
    return resolve_model(str(made(request.param)))


@pytest.fixture
def copied(model: Model, tmp_path: Path) -> Path:
    return shutil.copytree(model.path, tmp_path / "copied")


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def own_processor(model: Model) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(model.path)


def change(path: Path, changes: dict[str, Any]) -> None:
    """Set top-level settings of a JSON file; None removes one."""
    settings = json.loads(path.read_text()) | changes
    write_json(path, {name: value for name, value in settings.items() if value is not None})


def encode(model: Model, page: np.ndarray, tower: Any = None) -> torch.Tensor:
    family = family_of(model)
    spec = family.encode_spec(model)
    resized = family.resize(page, spec.geometry.place(*page.shape[:2]), spec)
    return (tower or family.load_tower(model)).encode(resized)


# ---------------------------------------------------------------- what the family says of itself


def test_stock_vllm_takes_the_rows_with_their_grid(model: Model) -> None:
    family = family_of(model)
    assert family.name == model.config["model_type"]
    assert family.delivery == Delivery.GRID
    assert family.modalities == ("image", "video")
    assert family.patches == ()
    assert family.cpu_dtype == ("bfloat16" if "qwen3_5" in family.name else None)
    assert family.warnings(model) == ()
    assert (family.row_width(model.config), family.text_hidden_size(model.config)) == (64, 64)


def test_settings_left_out_are_the_class_defaults(model: Model) -> None:
    family = family_of(model)
    defaults = transformers_config(model.config["model_type"])
    for name, value in family.vision_config({}).items():
        vision = defaults.vision_config
        theirs = vision.rope_parameters[name] if name == "rope_theta" else getattr(vision, name)
        assert value == (list(theirs) if isinstance(theirs, tuple) else theirs), name
    assert family.text_hidden_size({"text_config": {}}) == defaults.text_config.hidden_size


def transformers_config(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]()


def test_expected_tensors_are_those_of_transformers(model: Model) -> None:
    family = family_of(model)
    with torch.device("meta"):
        tower = family.make_shell(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in tower.state_dict().items()}
    assert family.expected_shapes(model.config) == shapes


@pytest.mark.parametrize(
    ("model_type", "vision", "parameters"),
    [
        ("qwen2_vl", {"in_chans": 3, "hidden_size": 3584}, 675_759_104),  # Qwen2-VL-7B
        ("qwen2_5_vl", {"hidden_size": 1280, "out_hidden_size": 3584}, 676_550_144),  # 7B
        ("qwen3_5", {"out_hidden_size": 4096, "deepstack_visual_indexes": []}, 456_010_480),  # 9B
    ],
)
def test_the_towers_of_the_released_models_have_their_size(
    made: Callable[[str], Path], model_type: str, vision: dict[str, Any], parameters: int
) -> None:
    shapes = family_of(resolve_model(str(made(model_type)))).expected_shapes(
        {"vision_config": vision}
    )
    assert sum(map(prod, shapes.values())) == parameters


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_the_text_settings_stand_at_the_top_or_apart(
    made: Callable[[str], Path], model_type: str
) -> None:
    family = family_of(resolve_model(str(made(model_type))))
    assert family.text_hidden_size({"hidden_size": 3584}) == 3584
    assert family.text_hidden_size({"hidden_size": 1, "text_config": {"hidden_size": 3584}}) == 3584


def test_traps_of_a_checkpoint_are_named(copied: Path) -> None:
    change(copied / "preprocessor_config.json", {"image_mean": None})
    config = json.loads((copied / "config.json").read_text())
    config.get("text_config", config)["hidden_size"] = 96
    write_json(copied / "config.json", config)
    model = resolve_model(str(copied))
    first, second = family_of(model).warnings(model)
    assert "no image_mean" in first
    assert second == "config.json: the tower's rows are 64 wide, the language model takes 96"


def test_planning_needs_neither_torch_nor_transformers(made: Callable[[str], Path]) -> None:
    lines = [
        "import sys",
        "from pipeline.checkpoint import resolve_model, vision_places",
        "from pipeline.families import family_of",
        f"for path in {[str(made(model_type)) for model_type in TYPES]!r}:",
        "    model = resolve_model(path)",
        "    family = family_of(model)",
        "    family.encode_spec(model).geometry.place(300, 200)",
        "    family.native_settings(family.encode_spec(model))",
        "    assert vision_places(model, family)",
        "    assert family.row_width(model.config) == family.text_hidden_size(model.config)",
        "    family.warnings(model)",
        "print(sorted({'torch', 'transformers', 'pyarrow', 'tqdm'} & sys.modules.keys()))",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("changes", "budget"),
    [
        ({}, None),
        ({"min_pixels": None, "max_pixels": None, "size": None}, (3136, 1_003_520)),
        ({"min_pixels": 4096, "max_pixels": 100_000, "size": None}, (4096, 100_000)),
        ({"min_pixels": None, "max_pixels": 90_000, "size": None}, (3136, 90_000)),
        # the old names win over `size`, edge by edge
        (
            {
                "min_pixels": None,
                "max_pixels": 50_000,
                "size": {"shortest_edge": 5000, "longest_edge": 90_000},
            },
            (5000, 50_000),
        ),
        (
            {
                "min_pixels": 5000,
                "max_pixels": 50_000,
                "size": {"min_pixels": 1, "max_pixels": 2},
            },
            (5000, 50_000),
        ),
    ],
)
def test_the_budget_is_that_of_the_processor(
    copied: Path, changes: dict[str, Any], budget: tuple[int, int] | None
) -> None:
    change(copied / "preprocessor_config.json", changes)
    model = resolve_model(str(copied))
    geometry = family_of(model).encode_spec(model).geometry
    size = own_processor(model).size
    assert (geometry.min_pixels, geometry.max_pixels) == (size.shortest_edge, size.longest_edge)
    if budget is not None:
        assert (geometry.min_pixels, geometry.max_pixels) == budget


@pytest.mark.parametrize(
    "size", [{"min_pixels": 784, "max_pixels": 100_000}, {"longest_edge": 100_000}, {"height": 224}]
)
def test_a_size_that_transformers_can_not_use_is_refused(copied: Path, size: Any) -> None:
    changes = {"min_pixels": None, "max_pixels": None, "size": size}
    change(copied / "preprocessor_config.json", changes)
    model = resolve_model(str(copied))
    with pytest.raises(CheckpointError, match="size has no shortest_edge"):
        family_of(model).encode_spec(model)
    with pytest.raises(ValueError, match="shortest_edge"):
        own_processor(model)(images=[noise(56, 56)])


def test_a_page_is_placed_as_the_processor_places_it(model: Model) -> None:
    family = family_of(model)
    geometry = family.encode_spec(model).geometry
    processor = own_processor(model)
    draw = random.Random(0)
    sizes = [(draw.randint(1, 4000), draw.randint(1, 4000)) for _ in range(2000)]
    for height, width in sizes:
        if max(height, width) > 200 * min(height, width):
            continue
        placement = geometry.place(height, width)
        patches = processor.get_number_of_image_patches(height, width)
        assert prod(placement.grid) == patches, (height, width)
        assert placement.tokens * 4 == patches, (height, width)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("resample", range(4))
def test_resized_pixels_are_those_of_the_processor(
    copied: Path, resample: int, size: tuple[int, int]
) -> None:
    change(copied / "preprocessor_config.json", {"resample": resample})
    model = resolve_model(str(copied))
    family, processor = family_of(model), own_processor(model)
    spec, page = family.encode_spec(model), noise(*size)
    placement = spec.geometry.place(*size)
    resized = family.resize(page, placement, spec)
    original = processor(images=[Image.fromarray(page)], return_tensors="pt")
    again = processor(images=[Image.fromarray(resized)], do_resize=False, return_tensors="pt")
    assert torch.equal(original["pixel_values"], again["pixel_values"])
    assert original["image_grid_thw"].tolist() == [list(placement.grid)]


@pytest.mark.parametrize("resample", [4, 5])
def test_a_resample_that_torchvision_lacks_is_refused(copied: Path, resample: int) -> None:
    change(copied / "preprocessor_config.json", {"resample": resample})
    model = resolve_model(str(copied))
    with pytest.raises(CheckpointError, match=f"resample can't be {resample}"):
        family_of(model).encode_spec(model)


@pytest.mark.parametrize(
    "kind", ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil"]
)
def test_each_name_of_the_processor_is_the_same_class(copied: Path, kind: str) -> None:
    change(copied / "preprocessor_config.json", {"image_processor_type": kind})
    model = resolve_model(str(copied))
    assert type(own_processor(model)).__name__ == "Qwen2VLImageProcessor"
    assert family_of(model).encode_spec(model).processor == "Qwen2VLImageProcessor/torchvision"


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("shards", [1, 5])
@pytest.mark.parametrize("prefix", ["visual.", "model.visual."])
def test_any_layout_gives_the_same_tower(
    model: Model, tmp_path: Path, prefix: str, shards: int
) -> None:
    maker = getattr(makers_qwen, f"make_{model.config['model_type']}")
    other = resolve_model(str(maker(tmp_path / "other", prefix=prefix, shards=shards)))
    assert f"{prefix}patch_embed.proj.weight" in load_weights(other.path)
    fingerprints = {tower_fingerprint(each, family_of(each)) for each in (model, other)}
    assert len(fingerprints) == 1
    assert torch.equal(encode(other, noise(90, 60)), encode(model, noise(90, 60)))


def test_tensors_that_do_not_fit_are_named(copied: Path) -> None:
    weights = load_weights(copied)
    patch = next(name for name in weights if name.endswith("visual.patch_embed.proj.weight"))
    prefix = patch.removesuffix("patch_embed.proj.weight")
    last = f"{prefix}merger.mlp.2" if f"{prefix}merger.mlp.2.bias" in weights else None
    last = last or f"{prefix}merger.linear_fc2"
    del weights[patch]
    weights[f"{prefix}deepstack_merger_list.0.norm.bias"] = torch.zeros(4)
    weights[f"{last}.bias"] = weights[f"{last}.bias"][:-1].clone()
    save_weights(copied, weights, 3)
    model = resolve_model(str(copied))
    with pytest.raises(CheckpointError) as error:
        family_of(model).load_tower(model)
    for problem in (
        "missing: patch_embed.proj.weight",
        "left over: deepstack_merger_list.0.norm.bias",
        f"of another shape: {last.removeprefix(prefix)}.bias [63] instead of [64]",
    ):
        assert problem in error.value.message


# ---------------------------------------------------------------- embeddings


def whole_model(model: Model) -> Any:
    """transformers' whole model in float32, loaded by transformers itself."""
    from transformers import AutoModelForImageTextToText

    whole, found = AutoModelForImageTextToText.from_pretrained(
        model.path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(found.values()), found
    return whole.model.eval()


def reference(whole: Any, model: Model, pages: list[np.ndarray]) -> list[torch.Tensor]:
    """Rows of each page, all of them in one batch."""
    images = [Image.fromarray(page) for page in pages]
    inputs = own_processor(model)(images=images, return_tensors="pt")
    with torch.no_grad():
        out = whole.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    return list(out.pooler_output)


def test_rows_are_those_of_the_whole_model_alone_and_in_any_batch(model: Model) -> None:
    """Cosine of each row at least 0.99999; sizes that fill windows, and that do not."""
    whole = whole_model(model)
    tower = family_of(model).load_tower(model)
    pages = [noise(*size, seed) for seed, size in enumerate(SIZES)]
    together = reference(whole, model, pages)
    backwards = reference(whole, model, pages[::-1])[::-1]
    for number, page in enumerate(pages):
        rows = encode(model, page, tower)
        assert rows.dtype == torch.float32
        (alone,) = reference(whole, model, [page])
        for expected in (alone, together[number], backwards[number]):
            assert rows.shape == expected.shape
            cosine = torch.nn.functional.cosine_similarity(rows, expected, dim=1)
            assert cosine.min() >= 0.99999
            torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)


def test_the_processor_s_own_resize_gives_the_same_rows(model: Model) -> None:
    family = family_of(model)
    spec, tower, page = family.encode_spec(model), family.load_tower(model), noise(100, 333)
    assert torch.equal(tower.encode_original(page, spec), encode(model, page, tower))


def test_a_page_is_resized_once(copied: Path) -> None:
    """The processor's rule is no fixed point: a strip above the budget would shrink again."""
    changes = {"min_pixels": None, "max_pixels": None}
    size = {"shortest_edge": 1024, "longest_edge": 5000}
    change(copied / "preprocessor_config.json", changes | {"size": size})
    model = resolve_model(str(copied))
    family, page = family_of(model), noise(32, 640)
    spec, tower = family.encode_spec(model), family.load_tower(model)
    placement = spec.geometry.place(32, 640)
    assert spec.geometry.place(placement.height_px, placement.width_px) != placement
    rows = encode(model, page, tower)
    assert len(rows) == placement.tokens
    assert torch.equal(rows, tower.encode_original(page, spec))


def test_rows_do_not_depend_on_the_pages_before(model: Model) -> None:
    tower = family_of(model).load_tower(model)
    first = encode(model, noise(96, 64, 1), tower)
    other = encode(model, noise(320, 320, 2), tower)
    assert torch.equal(encode(model, noise(96, 64, 1), tower), first)
    assert (first.mean(0) - other.mean(0)).abs().mean() > 0.01


def test_windowed_rows_are_in_the_page_s_own_order(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    """With windows in every layer, a change stays in its window of 2 x 2 rows."""
    path = shutil.copytree(made("qwen2_5_vl"), tmp_path / "windowed")
    config = json.loads((path / "config.json").read_text())
    config["vision_config"]["fullatt_block_indexes"] = []
    write_json(path / "config.json", config)
    model = resolve_model(str(path))
    tower = family_of(model).load_tower(model)
    page = noise(4 * 28, 6 * 28)  # rows 0..5 are the page's first line
    changed = page.copy()
    changed[2 * 28, 3 * 28] ^= 255  # in row 2 · 6 + 3
    difference = (encode(model, page, tower) - encode(model, changed, tower)).abs().amax(1)
    assert difference.nonzero().flatten().tolist() == [14, 15, 20, 21]


def test_patches_are_embedded_by_a_linear_layer_as_by_the_convolution(model: Model) -> None:
    """The convolution's kernel is its stride; as a convolution it is many times slower."""
    family = family_of(model)
    layer = family.load_tower(model)._shell.patch_embed.proj
    settings = family.vision_config(model.config)
    depth, side = settings["temporal_patch_size"], settings["patch_size"]
    kernel = (depth, side, side)
    convolution = torch.nn.Conv3d(3, layer.out_features, kernel, stride=kernel, bias=False)
    convolution.weight.data = layer.weight.data.reshape(-1, 3, *kernel)
    patches = torch.randn(50, 3, *kernel)
    with torch.inference_mode():
        expected = convolution(patches).flatten(1)
        found = layer(patches) - (0 if layer.bias is None else layer.bias)
    assert isinstance(layer, torch.nn.Linear)
    assert (found - expected).abs().max() < 1e-5
