"""Families whose embeddings go into the prompt: sizes, texts, names and rows are transformers'."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import load_weights, save_weights, write_json
from makers_prompt import PROMPT_MAKERS, make_lfm2_vl, make_mistral3
from PIL import Image

from pipeline.checkpoint import Model, resolve_model
from pipeline.errors import CheckpointError, UsageError
from pipeline.families import Delivery, Family, family_of
from pipeline.families.lfm2_vl import FAMILY as LFM2
from pipeline.families.mistral3 import FAMILY as MISTRAL3
from pipeline.geometry import AspectRatioError, GridTiles, LongestEdge, SquareTiles

NAMES = tuple(PROMPT_MAKERS)
SIZES = [
    *((1, 1), (1, 60), (27, 29), (28, 28), (56, 56), (57, 56), (64, 64), (96, 288), (160, 224)),
    *((169, 168), (200, 201), (300, 90), (333, 100), (337, 336), (450, 600), (700, 500)),
]
PAGES = [(1170, 827), (1754, 1240), (2339, 1654), (1240, 1754), (3300, 2550), (500, 3000)]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Each family's checkpoint, made when it is first asked for."""
    root, made = tmp_path_factory.mktemp("prompt"), dict[str, Path]()

    def checkpoint(name: str) -> Path:
        if name not in made:
            made[name] = PROMPT_MAKERS[name](root / name)
        return made[name]

    return checkpoint


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest, checkpoints: Callable[[str], Path]) -> Model:
    return resolve_model(str(checkpoints(request.param)))


@pytest.fixture
def family(model: Model) -> Family:
    return family_of(model)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def changed(directory: Path, file: str, changes: dict[str, Any]) -> Model:
    path = directory / file
    settings = json.loads(path.read_text()) | changes
    write_json(path, {name: value for name, value in settings.items() if value is not None})
    return resolve_model(str(directory))


# ---------------------------------------------------------------- sizes and placeholders


def joint_processor(model: Model) -> Any:
    """The processor that vLLM's native path uses."""
    import transformers

    if model.config["model_type"] in ("mistral3", "llava"):
        return transformers.PixtralProcessor.from_pretrained(model.path)
    return transformers.AutoProcessor.from_pretrained(model.path)


def expansion(model: Model, page: np.ndarray) -> str:
    """The text that transformers puts in the place of an image."""
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    if model.config["model_type"] == "smolvlm":  # its joint processor wants a package for videos
        found = AutoImageProcessor.from_pretrained(model.path)(
            images=[Image.fromarray(page)], return_row_col_info=True
        )
        tokens = ("<fake_token_around_image>", "<image>", "<global-img>")
        return get_image_prompt_string(found["rows"][0][0], found["cols"][0][0], 4, *tokens)
    processor = joint_processor(model)
    text = processor.image_token
    ids = processor(text=text, images=Image.fromarray(page), add_special_tokens=False)["input_ids"]
    return AutoTokenizer.from_pretrained(model.path).decode(torch.as_tensor(ids).flatten())


IMAGE_TOKENS = {"mistral3": "[IMG]", "pixtral_hf": "[IMG]", "lightonocr": "<|image_pad|>"}


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_placeholder_is_the_processors_expansion(
    model: Model, family: Family, size: tuple[int, int]
) -> None:
    spec = family.encode_spec(model)
    pieces = family.placeholder(model, spec, *size)
    image = IMAGE_TOKENS.get(family.name, "<image>")
    ours = "".join(image * piece if isinstance(piece, int) else piece for piece in pieces)
    theirs = expansion(model, noise(*size))
    if family.name == "lightonocr":  # vLLM takes Mistral 3's processor, then leaves out the breaks
        theirs = theirs.replace("<|vision_pad|>", "").replace("<|vision_end|>", "")
    assert ours == theirs
    rows = sum(piece for piece in pieces if isinstance(piece, int))
    assert rows == spec.geometry.place(*size).tokens


@pytest.mark.parametrize("size", [*SIZES, *PAGES], ids=str)
@pytest.mark.parametrize(("token_px", "edge"), [(16, 1024), (28, 1540), (28, 1000)])
def test_pixtral_sizes(token_px: int, edge: int, size: tuple[int, int]) -> None:
    from transformers.models.pixtral.image_processing_pixtral import get_resize_output_image_size

    page = np.broadcast_to(np.uint8(0), (*size, 3))
    placed = LongestEdge(token_px, edge).place(*size)
    theirs = get_resize_output_image_size(
        page, (edge, edge), (token_px, token_px), input_data_format="channels_last"
    )
    assert (placed.height_px, placed.width_px) == theirs
    assert placed.tokens == theirs[0] * theirs[1] // token_px**2


@pytest.mark.parametrize("size", [*SIZES, *PAGES], ids=str)
@pytest.mark.parametrize(("edge", "tile"), [(1820, 364), (2048, 512), (1000, 364), (5000, 364)])
def test_idefics3_sizes(edge: int, tile: int, size: tuple[int, int]) -> None:
    """The steps of the processor on a page of bytes: resize, then to whole tiles."""
    from transformers import Idefics3ImageProcessor
    from transformers.image_utils import SizeDict

    taken: list[tuple[int, int]] = []

    class Sizes(Idefics3ImageProcessor):
        """Notes what it would resize to."""

        def resize(self, image: torch.Tensor, size: SizeDict, **more: Any) -> torch.Tensor:
            from transformers.models.idefics3 import image_processing_idefics3 as theirs

            wanted = (size.height, size.width)
            if size.longest_edge:
                wanted = theirs.get_resize_output_image_size(image, size.longest_edge)
            taken.append(wanted)
            return torch.empty(1, 3, *wanted, device="meta")

    processor = Sizes()
    page = torch.empty(1, 3, *size, device="meta")
    page = processor.resize(page, SizeDict(longest_edge=edge))
    page = processor.resize_for_vision_encoder(page, tile)
    placed = SquareTiles(edge, tile, 9).place(*size)
    assert (placed.height_px, placed.width_px) == taken[-1]
    rows, columns = taken[-1][0] // tile, taken[-1][1] // tile
    assert placed.tiles == (rows * columns + 1 if rows * columns > 1 else 1)
    assert placed.tokens == placed.tiles * 9


def test_a_page_that_is_not_split_is_one_tile() -> None:
    placed = SquareTiles(1820, 364, 169, splitting=False).place(2339, 1654)
    assert (placed.height_px, placed.width_px, placed.tokens, placed.tiles) == (364, 364, 169, 1)


LFM2_REAL = GridTiles(16, 2, 64, 256, 512, 2, 10, 2.0, True)


@pytest.mark.parametrize("size", [*SIZES, *PAGES, (1, 1000), (1024, 1024), (724, 724)], ids=str)
@pytest.mark.parametrize("thumbnail", [True, False])
def test_lfm2_sizes(size: tuple[int, int], thumbnail: bool) -> None:
    from transformers import Lfm2VlImageProcessor

    geometry = GridTiles(16, 2, 64, 256, 512, 2, 10, 2.0, thumbnail)
    page = np.zeros((*size, 3), np.uint8)
    found = Lfm2VlImageProcessor(use_thumbnail=thumbnail)(
        images=[page],
        input_data_format="channels_last",
        return_row_col_info=True,
        return_tensors="pt",
    )
    height, width = geometry.resized(*size)
    assert [[height, width]] == [list(map(int, found["image_sizes"][0]))]
    assert geometry.layout(*size) == (int(found["image_rows"][0]), int(found["image_cols"][0]))
    placed = geometry.place(*size)
    assert placed.tiles == len(found["spatial_shapes"])
    assert placed.tokens == int(found["spatial_shapes"].prod(dim=1).sum()) // 4


def test_equal_distances_go_to_the_larger_grid_that_is_filled() -> None:
    assert LFM2_REAL.layout(1024, 1024) == (2, 2)
    assert LFM2_REAL.layout(2048, 2048) == (3, 3)


@pytest.mark.parametrize(
    ("geometry", "size"), [(LongestEdge(28, 1540), (1, 1541)), (LFM2_REAL, (1, 1100))]
)
def test_a_page_too_long_is_refused(
    geometry: LongestEdge | GridTiles, size: tuple[int, int]
) -> None:
    for height, width in (size, size[::-1]):
        with pytest.raises(AspectRatioError, match="px"):
            geometry.place(height, width)


# ---------------------------------------------------------------- embeddings


def whole_model(model: Model, family: Family) -> Any:
    """transformers' own class with all of the checkpoint, float32."""
    import transformers

    name = "LightOnOcrForConditionalGeneration" if family.name == "lightonocr" else family.shell
    whole = getattr(transformers, name)
    settings = dict(model.config)
    if family.name == "lightonocr":
        settings["model_type"] = "lighton_ocr"
    config = whole.config_class.from_dict(settings)
    return whole.from_pretrained(model.path, config=config, dtype=torch.float32).eval()


def reference(model: Model, family: Family, page: np.ndarray) -> torch.Tensor:
    """Rows of the page as the whole model makes them of what the joint processor gives."""
    from transformers import AutoImageProcessor

    image = Image.fromarray(page)
    if family.name == "smolvlm":
        processor = AutoImageProcessor.from_pretrained(model.path)
        inputs = processor(images=[image], return_tensors="pt")
    else:
        processor = joint_processor(model)
        inputs = processor(text=processor.image_token, images=[image], return_tensors="pt")
    wanted = ("pixel_values", "image_sizes", "pixel_attention_mask", "spatial_shapes")
    given = {name: inputs[name] for name in wanted if name in inputs}
    with torch.no_grad():
        out = whole_model(model, family).model.get_image_features(**given).pooler_output
    return out.flatten(0, 1) if isinstance(out, torch.Tensor) else torch.cat(tuple(out))


def test_rows_are_those_of_the_whole_model(model: Model, family: Family) -> None:
    spec, tower = family.encode_spec(model), family.load_tower(model)
    for size in ((160, 224), (300, 90), (40, 50)):
        page = noise(*size)
        placed = spec.geometry.place(*size)
        rows = tower.encode(family.resize(page, placed, spec))
        assert rows.shape == (placed.tokens, family.row_width(model.config))
        assert rows.dtype == torch.float32
        cosine = torch.cosine_similarity(rows, reference(model, family, page), dim=1)
        assert cosine.min() >= 0.99999, (size, cosine.min())
        assert torch.equal(tower.encode_original(page, spec), rows)


def test_rows_depend_on_the_page_and_on_nothing_before_it(model: Model, family: Family) -> None:
    tower = family.load_tower(model)
    first, other = tower.encode(noise(96, 64, 1)), tower.encode(noise(96, 64, 2))
    assert (first - other).abs().mean() > 0.01
    assert torch.equal(tower.encode(noise(96, 64, 1)), first)


# ---------------------------------------------------------------- names


def test_vision_tensors_are_found_and_no_others(model: Model, family: Family) -> None:
    found = {name for name in load_weights(model.path) if family.weight_name(name) is not None}
    vision = ("vision", "multi_modal_projector", "connector")
    assert found == {name for name in load_weights(model.path) if any(v in name for v in vision)}
    assert found


@pytest.mark.parametrize("maker", ["mistral3", "pixtral_hf", "lfm2_vl"])
def test_both_spellings_of_a_checkpoint_are_read(maker: str, tmp_path: Path) -> None:
    rows = []
    for old in (True, False):
        model = resolve_model(str(PROMPT_MAKERS[maker](tmp_path / str(old), old=old)))
        rows.append(family_of(model).load_tower(model).encode(noise(64, 64)))
    assert torch.equal(*rows)


def test_a_pooling_head_is_no_part_of_the_tower(tmp_path: Path) -> None:
    model = resolve_model(str(make_lfm2_vl(tmp_path / "head", head=True)))
    stored = [name for name in load_weights(model.path) if ".head." in name]
    assert stored and all(LFM2.weight_name(name) is None for name in stored)
    assert LFM2.load_tower(model).encode(noise(64, 64)).shape == (4, 64)


def test_a_missing_and_a_left_over_tensor_are_named(
    model: Model, family: Family, tmp_path: Path
) -> None:
    copied = shutil.copytree(model.path, tmp_path / "copied")
    weights = load_weights(copied)
    name = sorted(name for name in weights if family.weight_name(name) is not None)[0]
    moved = weights.pop(name)
    save_weights(copied, weights | {f"{name}_2": moved}, 1)
    with pytest.raises(CheckpointError) as error:
        family.load_tower(resolve_model(str(copied)))
    tower_name = family.weight_name(name)
    assert f"missing: {tower_name}" in error.value.message
    assert f"left over: {tower_name}_2" in error.value.message


# ---------------------------------------------------------------- settings


def test_every_family_goes_through_the_prompt(family: Family) -> None:
    assert family.delivery is Delivery.PROMPT
    assert family.modalities == ("image",)


def test_lightonocr_is_known_by_its_architecture(checkpoints: Callable[[str], Path]) -> None:
    names = [family_of(resolve_model(str(checkpoints(name)))).name for name in NAMES[:2]]
    assert names == ["mistral3", "lightonocr"]


def test_a_model_type_that_vllm_does_not_start_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": "lighton_ocr"})
    with pytest.raises(CheckpointError, match="model_type mistral3 and architectures LightOnOCR"):
        family_of(resolve_model(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "file", "changes", "message"),
    [
        ("mistral3", "processor_config.json", {"spatial_merge_size": 1}, "makes tokens of 14 px"),
        ("pixtral_hf", "processor_config.json", {"patch_size": 14}, "the tower of 16 px"),
        ("mistral3", "preprocessor_config.json", {"size": {"height": 9}}, "no longest_edge"),
        ("mistral3", "preprocessor_config.json", {"do_normalize": False}, "do_normalize"),
        ("idefics3", "processor_config.json", {"image_seq_len": 169}, "4 rows of a tile of 56 px"),
        ("idefics3", "preprocessor_config.json", {"max_image_size": {}}, "no longest_edge"),
        ("smolvlm", "preprocessor_config.json", {"do_resize": False}, "do_resize"),
        ("lfm2_vl", "preprocessor_config.json", {"encoder_patch_size": 14}, "patches of 14 px"),
        ("lfm2_vl", "preprocessor_config.json", {"tile_size": 72}, "tiles of 72 px"),
        ("lfm2_vl", "config.json", {"downsample_factor": "x"}, "downsample_factor can't be 'x'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    checkpoints: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    file: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    model = changed(shutil.copytree(checkpoints(name), tmp_path / name), file, changes)
    family = family_of(model)
    with pytest.raises(CheckpointError) as error:
        family.encode_spec(model)
    assert message in error.value.message


def test_a_pixel_budget_is_refused(model: Model, family: Family) -> None:
    with pytest.raises(UsageError, match="have no pixel budget"):
        family.encode_spec(model, max_pixels=100_000)


def test_settings_left_out_are_the_class_defaults() -> None:
    """A checkpoint that spells them out has the same fingerprint as one that does not."""
    import transformers as hf

    pixtral, siglip2 = hf.PixtralVisionConfig(), hf.Siglip2VisionConfig()
    idefics3 = hf.Idefics3Config().vision_config
    plain = {"vision_config": {}, "text_config": {}}
    for family, theirs in ((MISTRAL3, pixtral), (LFM2, siglip2)):
        for name, value in family.vision_config(plain).items():
            if hasattr(theirs, name):
                assert value == getattr(theirs, name), name
    assert MISTRAL3.vision_config(plain)["rope_theta"] == pixtral.rope_parameters["rope_theta"]
    for name, value in family_of_type("idefics3").vision_config(plain).items():
        assert value == getattr(idefics3, name, value), name


def family_of_type(model_type: str) -> Family:
    return family_of(Model(Path(), model_type, {"model_type": model_type}))


def test_rope_theta_means_the_same_wherever_it_stands() -> None:
    old = {"vision_config": {"rope_theta": 5000.0}, "text_config": {}}
    rope = {"rope_theta": 5000.0, "rope_type": "axial"}
    new = {"vision_config": {"rope_parameters": rope}, "text_config": {}}
    assert MISTRAL3.vision_config(old) == MISTRAL3.vision_config(new)


def test_vllm_is_told_the_widths_that_it_misses(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    config = resolve_model(str(checkpoints("lfm2_vl"))).config
    assert LFM2.config_overrides(config) == {"text_config": {"block_dim": 64, "conv_dim": 64}}
    whole = {**config, "text_config": config["text_config"] | {"block_dim": 64, "conv_dim": 64}}
    assert LFM2.config_overrides(whole) == {}


def test_what_the_native_path_does_wrong_is_named(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    model = resolve_model(str(make_mistral3(tmp_path / "plain")))
    assert MISTRAL3.warnings(model) == ()
    model = changed(model.path, "preprocessor_config.json", {"image_mean": None})
    assert "no image_mean: vLLM's native path may feed raw pixels" in MISTRAL3.warnings(model)[0]
    copied = shutil.copytree(checkpoints("lightonocr"), tmp_path / "lightonocr")
    model = changed(copied, "preprocessor_config.json", {"size": {"longest_edge": 280}})
    assert "vision_config.image_size is 336" in family_of(model).warnings(model)[0]
    copied = shutil.copytree(checkpoints("idefics3"), tmp_path / "idefics3")
    assert family_of(resolve_model(str(copied))).warnings(resolve_model(str(copied))) == ()
    model = changed(copied, "preprocessor_config.json", {"size": {"longest_edge": 200}})
    assert "pages of 200 px are no whole tiles of 56 px" in family_of(model).warnings(model)[0]
    copied = make_lfm2_vl(tmp_path / "lfm2_vl", old=False)
    model = changed(copied, "preprocessor_config.json", {"use_thumbnail": False})
    thumbnail, names = LFM2.warnings(model)
    assert "use_thumbnail is off" in thumbnail
    assert "named as model.vision_tower.embeddings" in names
    assert LFM2.warnings(resolve_model(str(checkpoints("lfm2_vl")))) == ()
