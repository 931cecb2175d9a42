"""InternVL, LLaVA, LLaVA-NeXT, MiniCPM-V 4.6: sizes, names and rows are those of transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import load_weights, save_weights, write_json
from makers_tiled import (
    SIGLIP,
    make_internvl,
    make_llava,
    make_llava_next,
    make_minicpmv4_6,
)
from PIL import Image

from pipeline.checkpoint import Model, resolve_model, tower_fingerprint
from pipeline.errors import CheckpointError, UsageError
from pipeline.families import Delivery, family_of
from pipeline.families.llava import Llava
from pipeline.geometry import (
    AnyResolution,
    AspectRatioError,
    FixedSize,
    PageSlices,
    Placement,
    ShapedCanvas,
)
from pipeline.keys import EncodeSpec, cache_key
from pipeline.plugin import minicpmv4_6

MAKERS: dict[str, Callable[[Path], Path]] = {
    "internvl": make_internvl,
    "llava": make_llava,
    "llava-siglip": lambda directory: make_llava(directory, vision=SIGLIP),
    "llava_next": make_llava_next,
    "llava_next-layers": lambda directory: make_llava_next(
        directory, vision=SIGLIP, vision_feature_layer=[-3, -1]
    ),
    "minicpmv4_6": make_minicpmv4_6,
}
Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Each is made once; nothing is to write into it."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = MAKERS[name](tmp_path_factory.mktemp("tiled") / name)
        return made[name]

    return of


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def spec_of(model: Model) -> EncodeSpec:
    return family_of(model).encode_spec(model)


def rows_of(model: Model, page: np.ndarray) -> torch.Tensor:
    family, spec = family_of(model), spec_of(model)
    placement = spec.geometry.place(*page.shape[:2])
    return family.load_tower(model).encode(family.resize(page, placement, spec))


def changed(model: Path, name: str, changes: dict[str, Any]) -> Model:
    """A setting that becomes None is taken out."""
    settings = json.loads((model / name).read_text()) | changes
    write_json(model / name, {key: value for key, value in settings.items() if value is not None})
    return resolve_model(str(model))


# ---------------------------------------------------------------- sizes

PAGES = [(1, 1), (1, 5000), (5000, 1), (2, 900), (448, 448), (449, 448), (3300, 2550), (30, 3000)]
_random = random.Random(0)
PAGES += [
    (_random.randint(1, limit), _random.randint(1, limit))
    for limit in (60, 500, 3000, 10_000)
    for _ in range(250)
]


@pytest.mark.parametrize(("least", "most", "tile"), [(1, 12, 448), (2, 6, 56), (1, 1, 448)])
def test_a_shaped_canvas_has_the_tiles_of_the_processor(least: int, most: int, tile: int) -> None:
    from transformers import GotOcr2ImageProcessor

    size = {"height": tile, "width": tile}
    theirs = GotOcr2ImageProcessor(
        crop_to_patches=True, min_patches=least, max_patches=most, size=size
    )
    ours = ShapedCanvas(tile, tile, 256, least, most)
    for page in PAGES:
        placement = ours.place(*page)
        assert placement.tiles == theirs.get_number_of_image_patches(*page, {}), page
        assert placement.tokens == 256 * placement.tiles


@pytest.mark.parametrize(
    ("tile", "patch", "canvases"),
    [
        (336, 14, ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))),
        (384, 14, tuple((384 * rows, 384 * columns) for rows in (1, 2, 3) for columns in (1, 2))),
    ],
)
def test_any_resolution_has_the_rows_of_the_processor(
    tile: int, patch: int, canvases: tuple[tuple[int, int], ...]
) -> None:
    from transformers import LlavaNextProcessor
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    theirs = LlavaNextProcessor.__new__(LlavaNextProcessor)
    theirs.image_processor = type("P", (), {"image_grid_pinpoints": [*map(list, canvases)]})
    theirs.patch_size, theirs.num_additional_image_tokens = patch, 0
    ours = AnyResolution(tile, tile // patch, canvases)
    for page in PAGES:
        placement = ours.place(*page)
        assert placement.tokens == theirs._get_number_of_features(*page, tile, tile), page
        assert placement.tiles == image_size_to_num_patches(page, [*map(list, canvases)], tile)


@pytest.mark.parametrize(("most", "scale", "patch"), [(9, 448, 14), (1, 448, 14), (25, 224, 16)])
def test_page_slices_are_those_of_the_processor(most: int, scale: int, patch: int) -> None:
    from transformers import MiniCPMV4_6ImageProcessor

    theirs = MiniCPMV4_6ImageProcessor(
        max_slice_nums=most, scale_resolution=scale, patch_size=patch
    )
    row = patch**2 * 16
    ours = PageSlices(patch, scale, most, 16)
    for page in PAGES:
        grid = theirs.get_sliced_grid(page, most, scale)
        height, width = theirs.find_best_resize(page, scale, patch, allow_upscale=grid is None)
        canvas, tokens, tiles = (height, width), height * width // row, 1
        if grid is not None:
            canvas = theirs.get_refine_size(page, grid, scale, patch, allow_upscale=True)
            tokens, tiles = tokens + canvas[0] * canvas[1] // row, grid[0] * grid[1] + 1
        assert ours.place(*page) == Placement(*canvas, tokens, tiles=tiles), page


@pytest.mark.parametrize(
    ("fit", "page", "refused"),
    [
        ("stretch", (1, 60_000), False),
        ("crop", (10, 17_000), False),
        ("crop", (10, 18_000), True),
        ("pad", (14_000, 10), False),
        ("pad", (15_000, 10), True),
    ],
)
def test_a_page_that_can_not_be_held_while_it_is_fitted_is_refused(
    fit: str, page: tuple[int, int], refused: bool
) -> None:
    geometry = FixedSize(336, 576, fit, 336)
    if refused:
        with pytest.raises(AspectRatioError, match=f"{page[1]} x {page[0]} px would be"):
            geometry.place(*page)
    else:
        assert geometry.place(*page) == Placement(336, 336, 576)


def test_a_page_without_pixels_is_a_broken_program() -> None:
    kinds = (
        ShapedCanvas(56, 56, 4, 1, 6),
        AnyResolution(56, 4, ((56, 56),)),
        PageSlices(14, 112, 9, 16),
        FixedSize(56, 16, "crop", 56),
    )
    assert len({geometry.kind for geometry in kinds}) == 4
    for geometry in kinds:
        with pytest.raises(ValueError, match="at least 1 x 1 px"):
            geometry.place(0, 5)


# ---------------------------------------------------------------- rows

SIZES = [(40, 50), (160, 224), (448, 320), (20, 700)]


def reference(path: Path, page: np.ndarray) -> tuple[torch.Tensor, int]:
    """Rows (R, O) that transformers' whole model makes, float32, and placeholders that its joint
    processor writes for them: no name, size or default of ours is in it."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    whole = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(path)
    token = processor.image_token
    inputs = processor(images=[Image.fromarray(page)], text=token, return_tensors="pt")
    wanted = ("pixel_values", "image_sizes", "target_sizes")
    given = {name: inputs[name] for name in wanted if name in inputs}
    with torch.no_grad():
        found = whole.model.get_image_features(**given).pooler_output
    rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in found])
    return rows, int((inputs["input_ids"] == processor.image_token_id).sum())


@pytest.mark.parametrize("name", MAKERS)
def test_embeddings_are_those_of_the_whole_model(name: str, checkpoint: Checkpoint) -> None:
    path = checkpoint(name)
    model = resolve_model(str(path))
    geometry, width = spec_of(model).geometry, family_of(model).row_width(model.config)
    for size in SIZES:
        page = noise(*size)
        rows = rows_of(model, page)
        expected, placeholders = reference(path, page)
        assert rows.dtype == torch.float32
        assert tuple(rows.shape) == (geometry.place(*size).tokens, width) == tuple(expected.shape)
        assert placeholders == len(rows)
        cosine = torch.nn.functional.cosine_similarity(rows, expected, dim=1)
        assert cosine.min() >= 0.99999, size
        assert (rows - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", MAKERS)
def test_different_pages_have_different_rows(name: str, checkpoint: Checkpoint) -> None:
    model = resolve_model(str(checkpoint(name)))
    tower = family_of(model).load_tower(model)
    one, two = (tower.encode(noise(160, 224, seed)) for seed in (1, 2))
    same = (one == two).all(dim=1).sum()
    assert same == (6 if name.startswith("llava_next") else 0)  # `image_newline` after each line
    assert (one - two).abs().mean() > 0.01
    assert torch.equal(tower.encode(noise(160, 224, 1)), one)


def test_a_processor_that_crops_nothing_by_itself_crops_for_internvl(
    checkpoint: Checkpoint,
) -> None:
    """The hub's JSON says crop_to_patches: false, and InternVLProcessor switches it on."""
    path = checkpoint("internvl")
    assert json.loads((path / "preprocessor_config.json").read_text())["crop_to_patches"] is False
    assert len(rows_of(resolve_model(str(path)), noise(448, 320))) == 7 * 4


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("make", [make_internvl, make_llava, make_llava_next])
def test_both_prefixes_and_any_number_of_files_are_the_same_tower(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    old = make(tmp_path / "old")
    new = make(tmp_path / "new", prefix="model.", shards=3)
    assert not load_weights(old).keys() & load_weights(new).keys()
    one, two = (resolve_model(str(path)) for path in (old, new))
    family = family_of(one)
    assert tower_fingerprint(one, family) == tower_fingerprint(two, family)
    assert torch.equal(rows_of(one, noise(90, 120)), rows_of(two, noise(90, 120)))


def test_names_before_transformers_5_7_are_the_same_tower(tmp_path: Path) -> None:
    path = make_minicpmv4_6(tmp_path / "minicpm")
    model = resolve_model(str(path))
    new = tower_fingerprint(model, family_of(model))
    old_names = (
        ("model.vision_tower.vit_merger.", "model.vit_merger."),
        ("model.vision_tower.", "model.vpm."),
    )
    renamed = {}
    for name, tensor in load_weights(path).items():
        for current, old in old_names:
            name = name.replace(current, old)
        renamed[name] = tensor
    save_weights(path, renamed, 1)
    assert any(name.startswith("model.vpm.") for name in renamed)
    assert tower_fingerprint(model, family_of(model)) == new


def test_names_that_only_the_native_path_rejects_are_warned_of(tmp_path: Path) -> None:
    """transformers 5 saves them so, if a model is built from its config."""
    path = make_llava(tmp_path / "llava")
    model = resolve_model(str(path))
    assert family_of(model).warnings(model) == ()
    rows, fingerprint = rows_of(model, noise(60, 60)), tower_fingerprint(model, family_of(model))
    bare = {
        name.replace("vision_tower.vision_model.", "vision_tower."): tensor
        for name, tensor in load_weights(path).items()
    }
    save_weights(path, bare, 1)
    (warning,) = family_of(model).warnings(model)
    assert "not vision_tower.vision_model.…: vLLM's native path can't load its tower" in warning
    assert tower_fingerprint(model, family_of(model)) == fingerprint
    assert torch.equal(rows_of(model, noise(60, 60)), rows)


@pytest.mark.parametrize("name", ["internvl", "llava", "llava_next", "minicpmv4_6"])
def test_normalisation_that_is_left_out_is_warned_of(name: str, tmp_path: Path) -> None:
    path = MAKERS[name](tmp_path / name)
    model = changed(path, "preprocessor_config.json", {"image_mean": None, "image_std": None})
    (warning,) = family_of(model).warnings(model)
    assert warning.startswith("the image processor's JSON has no image_mean and no image_std")


UNUSED = [".vision_model.head.", ".position_ids"]


def test_what_no_row_is_made_of_may_be_there_or_not(tmp_path: Path) -> None:
    path = make_llava(tmp_path / "llava", vision=SIGLIP)
    weights, model = load_weights(path), resolve_model(str(path))
    family = family_of(model)
    fingerprint, rows = tower_fingerprint(model, family), rows_of(model, noise(60, 60))
    assert any(UNUSED[0] in name for name in weights)
    fewer = {name: tensor for name, tensor in weights.items() if UNUSED[0] not in name}
    numbers = {"vision_tower.vision_model.embeddings.position_ids": torch.arange(16)[None]}
    save_weights(path, fewer | numbers, 1)
    assert tower_fingerprint(model, family) == fingerprint
    assert torch.equal(rows_of(model, noise(60, 60)), rows)


TENSORS = {
    "internvl": "multi_modal_projector.linear_2.bias",
    "llava": "vision_tower.vision_model.encoder.layers.1.mlp.fc1.weight",
    "llava_next": "image_newline",
    "minicpmv4_6": "model.vision_tower.vit_merger.pre_norm.weight",
}


@pytest.mark.parametrize("name", TENSORS)
def test_missing_and_left_over_tensors_are_named(name: str, tmp_path: Path) -> None:
    path, tensor = MAKERS[name](tmp_path / name), TENSORS[name]
    weights, model = load_weights(path), resolve_model(str(path))
    ours = tensor.removeprefix("model.").replace(".vision_model.", ".")
    extra = "model.vision_tower.extra" if name == "minicpmv4_6" else "vision_tower.extra"
    save_weights(path, {k: v for k, v in weights.items() if k != tensor}, 1)
    with pytest.raises(CheckpointError, match=f"tensors missing: {ours}"):
        family_of(model).load_tower(model)
    save_weights(path, weights | {extra: torch.zeros(3)}, 1)
    with pytest.raises(CheckpointError, match=r"tensors left over: vision_tower\.extra"):
        family_of(model).load_tower(model)
    save_weights(path, weights | {tensor: torch.zeros(7)}, 1)
    with pytest.raises(CheckpointError, match=rf"of another shape: {ours} \[7\] instead of"):
        family_of(model).load_tower(model)


# ---------------------------------------------------------------- settings


def settings_of(config: Any) -> dict[str, Any]:
    """Attributes of a config of transformers, as JSON would have them."""
    return json.loads(json.dumps(config.to_dict()))


@pytest.mark.parametrize("name", ["internvl", "llava", "llava-siglip", "llava_next", "minicpmv4_6"])
def test_settings_left_out_are_the_class_defaults(name: str) -> None:
    import transformers

    classes = {
        "internvl": transformers.InternVLConfig,
        "llava": transformers.LlavaConfig,
        "llava_next": transformers.LlavaNextConfig,
        "minicpmv4_6": transformers.MiniCPMV4_6Config,
    }
    kind, _, tower = name.partition("-")
    vision = {"model_type": "siglip_vision_model"} if tower else {}
    model = Model(Path("nowhere"), name, {"model_type": kind})
    given = {"model_type": kind, "vision_config": dict(vision), "text_config": {}}
    ours = family_of(model).vision_config(given)
    text = {"text_config": {"model_type": "qwen3_5_text"}} if kind == "minicpmv4_6" else {}
    theirs = settings_of(classes[kind](vision_config=dict(vision), **text))
    expected = theirs | theirs["vision_config"]
    assert ours == {setting: expected[setting] for setting in ours}


def test_a_llava_without_a_vision_config_has_its_own_default() -> None:
    from transformers import LlavaConfig

    ours = Llava.vision_config(family_of(Model(Path("x"), "x", {"model_type": "llava"})), {})
    theirs = settings_of(LlavaConfig())["vision_config"]
    assert (ours["image_size"], ours["num_hidden_layers"]) == (336, 24)
    assert {name: theirs.get(name) for name in ours if name in theirs} == {
        name: value for name, value in ours.items() if name in theirs
    }


PROCESSORS = [
    ("internvl", "GotOcr2ImageProcessor"),
    ("llava", "CLIPImageProcessor"),
    ("llava-siglip", "SiglipImageProcessor"),
    ("llava_next", "LlavaNextImageProcessor"),
    ("minicpmv4_6", "MiniCPMV4_6ImageProcessor"),
]


@pytest.mark.parametrize(("name", "kind"), PROCESSORS)
def test_processor_settings_left_out_are_the_class_defaults(
    name: str, kind: str, tmp_path: Path
) -> None:
    import transformers

    path = MAKERS[name](tmp_path / name)
    kept = ("size", "crop_size", "image_grid_pinpoints", "scale_resolution")
    image = json.loads((path / "preprocessor_config.json").read_text())
    drop = {key: None for key in image if key not in (*kept, "image_processor_type")}
    model = changed(path, "preprocessor_config.json", drop)
    theirs, spec = getattr(transformers, kind)(), spec_of(model)
    assert spec.processor == f"{kind}/torchvision"
    assert spec.resample == "bicubic" and int(theirs.resample) == 3
    assert list(spec.image_mean) == list(theirs.image_mean)
    assert list(spec.image_std) == list(theirs.image_std)
    assert spec.rescale_factor == theirs.rescale_factor
    if isinstance(spec.geometry, ShapedCanvas):
        assert spec.geometry.max_tiles == theirs.max_patches == 12
    if isinstance(spec.geometry, PageSlices):
        assert (spec.geometry.max_slices, spec.geometry.patch_px) == (9, theirs.patch_size)


@pytest.mark.parametrize("name", ["internvl", "llava-siglip", "llava_next", "minicpmv4_6"])
def test_a_null_in_the_processors_json_is_the_class_default(name: str, tmp_path: Path) -> None:
    """As transformers' processors of the torchvision kind are saved."""
    path = MAKERS[name](tmp_path / name)
    spec = spec_of(resolve_model(str(path)))
    settings = json.loads((path / "preprocessor_config.json").read_text())
    nulls = dict.fromkeys(("do_center_crop", "do_pad", "resample", "rescale_factor"))
    if name == "llava-siglip":
        nulls["crop_size"] = None
    write_json(path / "preprocessor_config.json", settings | nulls)
    assert spec_of(resolve_model(str(path))) == spec


DELIVERED = {
    "internvl": (Delivery.ROWS, None, ("image", "video")),
    "llava": (Delivery.ROWS, None, ("image",)),
    "llava_next": (Delivery.ROWS, None, ("image",)),
    "minicpmv4_6": (Delivery.SIZES, "bfloat16", ("image", "video")),
}


@pytest.mark.parametrize("name", DELIVERED)
def test_a_family_says_how_vllm_takes_it(name: str, checkpoint: Checkpoint) -> None:
    model = resolve_model(str(checkpoint(name)))
    family = family_of(model)
    assert (family.delivery, family.cpu_dtype, family.modalities) == DELIVERED[name]
    assert (family.row_width(model.config), family.text_hidden_size(model.config)) == (64, 64)
    with pytest.raises(UsageError, match=f"models of type {name} have no pixel budget"):
        family.encode_spec(model, max_pixels=100_000)


def test_a_setting_that_decides_rows_changes_fingerprint_or_key(tmp_path: Path) -> None:
    path = make_llava(tmp_path / "llava")
    model = resolve_model(str(path))
    family = family_of(model)
    fingerprint, key = tower_fingerprint(model, family), cache_key("p", spec_of(model), "t")
    other_layer = changed(path, "config.json", {"vision_feature_layer": -1})
    assert tower_fingerprint(other_layer, family) != fingerprint
    padded = {"image_processor_type": "LlavaImageProcessor", "do_pad": True}
    other_fit = changed(path, "preprocessor_config.json", padded)
    assert cache_key("p", spec_of(other_fit), "t") != key
    geometry = spec_of(other_fit).geometry
    assert isinstance(geometry, FixedSize) and geometry.fit == "pad"


@pytest.mark.parametrize(
    ("changes", "fit"),
    [
        ({"size": 56, "crop_size": 56}, "crop"),
        ({"size": {"height": 56, "width": 56}}, "stretch"),
        ({"size": {"height": 56, "width": 56}, "do_center_crop": False}, "stretch"),
        ({"size": {"shortest_edge": 64}}, "crop"),
        ({"image_processor_type": "LlavaImageProcessor", "do_pad": True}, "pad"),
    ],
)
def test_each_way_of_making_a_square_is_the_processors(
    changes: dict[str, Any], fit: str, tmp_path: Path
) -> None:
    path = make_llava(tmp_path / "llava", processor=changes)
    model = resolve_model(str(path))
    geometry = spec_of(model).geometry
    assert isinstance(geometry, FixedSize) and geometry.fit == fit
    page = noise(70, 130)
    expected, placeholders = reference(path, page)
    rows = rows_of(model, page)
    assert len(rows) == placeholders == geometry.rows
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)


def test_pixtral_in_transformers_format_is_another_family() -> None:
    config = {"model_type": "llava", "vision_config": {"model_type": "pixtral"}}
    assert family_of(Model(Path("x"), "x", config)).delivery is Delivery.PROMPT
    with pytest.raises(CheckpointError, match="model type 'pixtral', which is not supported here"):
        family_of(Model(Path("x"), "x", {"model_type": "llava"})).vision_config(config)


CONFIG, IMAGE = "config.json", "preprocessor_config.json"
REFUSED = [
    ("internvl", CONFIG, {"vision_feature_layer": -2}, "vision_feature_layer is -2"),
    ("internvl", CONFIG, {"vision_feature_select_strategy": "full"}, "select_strategy is 'full'"),
    ("internvl", IMAGE, {"size": {"height": 28, "width": 28}}, "cuts tiles of 28 x 28 px"),
    ("internvl", IMAGE, {"image_processor_type": "CLIPImageProcessor"}, "CLIPImageProcessor"),
    ("internvl", CONFIG, {"vision_config": {"image_size": [56, 0]}}, "image_size can't be"),
    ("internvl", CONFIG, {"vision_config": {"image_size": [56, 28]}}, "takes 28 x 56 px"),
    ("internvl", CONFIG, {"downsample_ratio": 0.0}, "give no square of rows"),
    ("llava", IMAGE, {"crop_size": {"height": 28, "width": 28}}, "makes squares of 28 px"),
    ("llava", IMAGE, {"crop_size": {"height": 56, "width": 28}}, "crop_size can't be"),
    ("llava", IMAGE, {"size": "x"}, "size can't be 'x'"),
    ("llava", IMAGE, {"do_center_crop": False}, "makes no squares"),
    ("llava", IMAGE, {"do_rescale": False}, "not supported: do_rescale"),
    ("llava", IMAGE, {"image_processor_type": "ViTImageProcessor"}, "ViTImageProcessor"),
    ("llava", CONFIG, {"vision_feature_layer": 7}, "vision_feature_layer can't be 7"),
    ("llava", CONFIG, {"vision_feature_layer": []}, "vision_feature_layer can't be []"),
    ("llava", CONFIG, {"vision_config": {"model_type": "aimv2"}}, "model type 'aimv2'"),
    ("llava_next", IMAGE, {"image_grid_pinpoints": [[56, 112]]}, "both must be the same"),
    ("llava_next", CONFIG, {"image_grid_pinpoints": "x"}, "image_grid_pinpoints can't be 'x'"),
    ("llava_next", IMAGE, {"size": {"shortest_edge": 28}}, "scales them to 28 px"),
    ("llava_next", CONFIG, {"vision_feature_select_strategy": "full"}, "no square of rows"),
    ("minicpmv4_6", IMAGE, {"slice_mode": False}, "slice_mode"),
    ("minicpmv4_6", IMAGE, {"downsample_mode": "4x"}, "downsample_mode"),
    ("minicpmv4_6", IMAGE, {"patch_size": 16}, "patch_size"),
    ("minicpmv4_6", CONFIG, {"drop_vision_last_layer": True}, "drop_vision_last_layer"),
    ("minicpmv4_6", CONFIG, {"insert_layer_id": -1}, "insert_layer_id"),
    ("minicpmv4_6", CONFIG, {"merger_times": 2}, "merger_times"),
]


@pytest.mark.parametrize(("name", "file", "changes", "message"), REFUSED)
def test_settings_that_would_not_fit_are_refused_by_name(
    name: str,
    file: str,
    changes: dict[str, Any],
    message: str,
    checkpoint: Checkpoint,
    tmp_path: Path,
) -> None:
    for each in checkpoint(name).glob("*.json"):
        (tmp_path / each.name).write_bytes(each.read_bytes())
    with pytest.raises(CheckpointError) as error:
        spec_of(changed(tmp_path, file, changes))
    assert message in f"{error.value.message} {error.value.hint}"


def test_the_mode_with_four_times_the_rows_is_the_processors(tmp_path: Path) -> None:
    path = make_minicpmv4_6(
        tmp_path / "minicpm", processor={"downsample_mode": "4x"}, downsample_mode="4x"
    )
    model, page = resolve_model(str(path)), noise(160, 224)
    expected, placeholders = reference(path, page)
    rows = rows_of(model, page)
    assert len(rows) == placeholders == 4 * 20
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- MiniCPM-V's rows inside vLLM


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (torch.ones(6, 8), ""),
        (torch.ones(5, 8), "image_embeds has shape (5, 8), image_sizes asks for (6, 8)"),
        (torch.ones(6, 7), "image_embeds has shape (6, 7), image_sizes asks for (6, 8)"),
        (torch.ones(1, 6, 8), "image_embeds has shape (1, 6, 8), image_sizes asks for (6, 8)"),
        (
            torch.ones(6, 8, dtype=torch.int8),
            "image_embeds is torch.int8 instead of floating point",
        ),
        (torch.full((6, 8), torch.nan), "image_embeds has values that are not finite"),
    ],
)
def test_rows_that_do_not_fit_a_pages_size_are_named(rows: torch.Tensor, reason: str) -> None:
    assert minicpmv4_6.rows_misfit(rows, 6, 8) == reason


@pytest.mark.parametrize(
    ("inputs", "accepted", "fields"),
    [
        ({"pixel_values": 1}, True, {"pixel_values"}),
        ({"image_embeds": 1, "image_sizes": 2}, False, {"pixel_values"}),
    ],
)
def test_the_fields_of_other_requests_stay_as_they_are(
    inputs: dict[str, Any], accepted: bool, fields: set[str]
) -> None:
    """Pixels in our engines, and anything in engines that take no embeddings."""
    config = SimpleNamespace(multimodal_config=SimpleNamespace(enable_mm_embeds=accepted))
    info = SimpleNamespace(
        ctx=SimpleNamespace(model_config=config),
        get_hf_config=lambda: SimpleNamespace(model_type="minicpmv4_6"),
    )
    patched = minicpmv4_6._fields_with_sizes(lambda self, inputs, kwargs: {"pixel_values": 0})
    assert set(patched(SimpleNamespace(info=info), inputs, {})) == fields
