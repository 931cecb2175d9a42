"""Reports of people who do this job (preprocessing, PIL, PDF): each on small files made here.

Two more of them stand elsewhere: PDF threads and form fields in test_pages_pdf.py and
test_pages.py.
"""

from __future__ import annotations

import io
import json
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import makers_pages as make
import numpy as np
import pytest
from conftest import Pipeline
from PIL import Image, ImageDraw
from test_pages import failure_of, page_of, scene

from pipeline.checkpoint import resolve_model
from pipeline.encode.listing import PageLine, list_pages
from pipeline.errors import Reason
from pipeline.families import family_of
from pipeline.keys import EncodeSpec, cache_key

CASES = Path(__file__).parent / "cases"


def spec_of(name: str | Path) -> EncodeSpec:
    """The settings of a model's own processor files."""
    model = resolve_model(str(CASES / name))
    return family_of(model).encode_spec(model)


def lines_of(path: Path, spec: EncodeSpec) -> list[PageLine]:
    return list(list_pages([path], spec.geometry).pages)


# ---------------------------------------------------------------- preprocessing


@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl"])
def test_one_narrow_page_costs_itself_and_not_the_run(
    tmp_path: Path, pipeline: Pipeline, model: str
) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    for name in "abc":
        scene().save(pages / f"{name}.png")
    Image.new("L", (8, 8192)).save(pages / "strip.jpg")
    Image.new("1", (1, 65_537)).save(pages / "strip.tif", compression="group4")
    words = ["pages", "pages", "--json", "--model", CASES / model]
    listed = json.loads(pipeline(*words, cwd=tmp_path, code=3).stdout)["pages"]
    good = [page["file"] for page in listed if page["reason"] is None]
    bad = {page["file"]: (page["reason"], page["detail"]) for page in listed if page["reason"]}
    assert good == ["pages/a.png", "pages/b.png", "pages/c.png"]
    assert bad == {
        "pages/strip.jpg": (
            "aspect_ratio",
            "aspect ratio 1024.0 of 8 x 8192 px is above 200",
        ),
        "pages/strip.tif": (
            "aspect_ratio",
            "aspect ratio 65537.0 of 1 x 65537 px is above 200",
        ),
    }


@pytest.mark.parametrize(("model", "side"), [("qwen2_5_vl", 56), ("qwen3_vl", 256)])
@pytest.mark.parametrize("size", [(1, 1), (2, 2), (1, 2), (2, 1)])
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG", "TIFF"])
def test_the_smallest_pages_have_the_processor_s_least_size(
    tmp_path: Path, model: str, side: int, size: tuple[int, int], kind: str
) -> None:
    Image.new("RGB", size, "white").save(tmp_path / "page", kind)
    (line,) = lines_of(tmp_path / "page", spec_of(model))
    assert line.tokens is not None and line.tokens > 0
    assert line.model_width_px is not None and line.model_height_px is not None
    assert line.model_width_px * line.model_height_px >= side * side
    if size[0] == size[1]:
        assert (line.model_width_px, line.model_height_px, line.tokens) == (
            side,
            side,
            {56: 4, 256: 64}[side],
        )


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((305, 30), {"qwen2_5_vl": (308, 28), "qwen3_vl": (832, 96)}),
        ((1000, 1400), {"qwen2_5_vl": (1008, 1400), "qwen3_vl": (992, 1408)}),
    ],
)
def test_the_size_of_a_token_is_the_model_s_own(
    tmp_path: Path, size: tuple[int, int], expected: dict[str, tuple[int, int]]
) -> None:
    Image.new("RGB", size).save(tmp_path / "page.png")
    keys = set()
    for model, (width, height) in expected.items():
        spec = spec_of(model)
        (line,) = lines_of(tmp_path / "page.png", spec)
        assert (line.model_width_px, line.model_height_px) == (width, height)
        keys.add(cache_key("0" * 64, spec, "tower"))
    assert len(keys) == 2


def test_a_long_page_is_resized_once_and_not_shrunk_before(tmp_path: Path) -> None:
    Image.new("L", (690, 15_420)).save(tmp_path / "page.png")
    (line,) = lines_of(tmp_path / "page.png", spec_of("qwen2_5_vl"))
    assert (line.width_px, line.height_px) == (690, 15_420)
    assert (line.model_width_px, line.model_height_px) == (700, 15_428)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_pixels": 200_000},
        {"size": {"shortest_edge": 3136, "longest_edge": 200_000}, "max_pixels": None},
    ],
)
def test_the_pixel_budget_of_the_files_is_kept_and_in_the_key(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    small = shutil.copytree(CASES / "qwen2_5_vl", tmp_path / "model")
    settings = json.loads((small / "preprocessor_config.json").read_text()) | changes
    if settings["max_pixels"] is None:
        del settings["max_pixels"], settings["min_pixels"]
    (small / "preprocessor_config.json").write_text(json.dumps(settings))
    specs = [spec_of("qwen2_5_vl"), spec_of(small)]
    placements = [spec.geometry.place(3300, 2550) for spec in specs]
    assert placements[1].height_px * placements[1].width_px <= 200_000
    assert placements[0].height_px * placements[0].width_px > 8_000_000
    assert len({cache_key("0" * 64, spec, "tower") for spec in specs}) == 2


def test_pages_of_another_resize_kernel_are_never_served() -> None:
    """The processors' "fast" and "slow" classes differ by up to two levels."""
    spec = spec_of("qwen3_vl")
    others = [
        replace(spec, processor=spec.processor + "/pillow"),
        replace(spec, contract=spec.contract + 1),
        replace(spec, resample="lanczos"),
    ]
    assert "torchvision" in spec.processor
    assert len({cache_key("0" * 64, each, "tower") for each in (spec, *others)}) == 4


# ---------------------------------------------------------------- decoding


@pytest.mark.parametrize("kind", ["png", "png interlaced", "tiff", "tiff big-endian", "jp2"])
def test_a_scan_of_16_bits_is_no_white_page(tmp_path: Path, kind: str) -> None:
    levels = np.linspace(0, 65_535, 4096).reshape(64, 64).astype(np.uint16)
    path = tmp_path / "page"
    if kind.startswith("png"):
        make.write(path, make.png(levels[:, :, None], 16, 0, interlaced="interlaced" in kind))
    elif kind == "jp2":
        Image.fromarray(levels).save(path, "JPEG2000")
    else:
        order = ">" if "big" in kind else "<"
        page = (make.gray_tags(64, 64, 16), [levels.astype(f"{order}u2").tobytes()])
        make.write(path, make.tiff([page], order=order))
    rgb = page_of(path)
    assert (rgb == 255).all(axis=2).mean() < 0.02
    assert np.abs(rgb[:, :, 0].astype(int) - (levels >> 8)).max() <= 1


def test_a_phone_photo_lies_on_no_side(tmp_path: Path) -> None:
    """Both tags at once, as phones write them: EXIF says 6 and so does XMP; turned once."""
    exif = Image.Exif()
    exif[0x0112] = 6
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><tiff:Orientation>6</tiff:Orientation></x:xmpmeta>'
    stored = scene().transpose(Image.Transpose.ROTATE_90)
    stored.save(tmp_path / "page.jpg", exif=exif, xmp=xmp, quality=95)
    rgb = page_of(tmp_path / "page.jpg")
    assert rgb.shape == (64, 96, 3)
    assert np.abs(rgb.astype(int) - np.asarray(scene())).mean() < 4
    (line,) = lines_of(tmp_path / "page.jpg", spec_of("qwen2_5_vl"))
    assert line.model_width_px is not None and line.model_height_px is not None
    assert line.model_width_px > line.model_height_px


def test_a_cut_photo_is_no_gray_page(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (400, 400, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "page.jpg")
    data = (tmp_path / "page.jpg").read_bytes()
    (tmp_path / "page.jpg").write_bytes(data[:10_000])
    failure = failure_of(tmp_path / "page.jpg")
    assert (failure.page, failure.reason) == (None, Reason.TRUNCATED)
    assert lines_of(tmp_path / "page.jpg", spec_of("qwen3_vl"))[0].tokens is None


BOMB = """
import json, sys

def high_water_mark():  # in KiB; getrusage would count the process that started this one
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1])

from pipeline.pages import decode_pages, discover
list(decode_pages(discover([sys.argv[1]]).files[0]))
before = high_water_mark()
(failure,) = [*decode_pages(discover([sys.argv[2]]).files[0])]
after = high_water_mark()
print(json.dumps([failure.reason, failure.detail, after - before]))
"""


def smallest(kind: str) -> bytearray:
    """A good file of 8 × 8 px."""
    out = io.BytesIO()
    Image.new("L", (8, 8)).save(out, kind)
    return bytearray(out.getvalue())


def png_of(side: int) -> bytes:
    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    chunks = make.png_chunk(b"IHDR", head) + make.png_chunk(b"IDAT", b"x" * 100)
    return b"\x89PNG\r\n\x1a\n" + chunks


def gif_of(side: int) -> bytes:
    data = smallest("GIF")
    data[6:10] = struct.pack("<HH", side, side)
    return bytes(data)


def jpeg_of(side: int) -> bytes:
    data = smallest("JPEG")
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = struct.pack(">HH", side, side)
    return bytes(data)


def bmp_of(side: int) -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 1, 0, 0, 0, 0, 2, 0)
    return b"BM" + struct.pack("<IHHI", 62, 0, 0, 62) + head + bytes(8)


BOMBS = {
    "png": png_of(65_535),
    "jpeg": jpeg_of(65_535),
    "gif": gif_of(65_535),
    "bmp": bmp_of(65_535),
    "tiff": make.tiff([(make.gray_tags(65_535, 65_535), [b""])]),
    "tiff group 4": make.tiff([(make.gray_tags(65_535, 65_535, 1, compression=[4]), [bytes(99)])]),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_giant_page_is_refused_by_its_header_with_memory_flat(tmp_path: Path, kind: str) -> None:
    make.write(tmp_path / "bomb", BOMBS[kind])
    make.write(tmp_path / "good", bytes(smallest(kind.split()[0].upper())))
    words = [sys.executable, "-c", BOMB, tmp_path / "good", tmp_path / "bomb"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    reason, detail, growth_kib = json.loads(done.stdout)
    assert reason == "too_large"
    assert detail == "65535 x 65535 px is above 100,000,000 pixels"
    assert growth_kib < 4 * 1024


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_black_text_on_a_transparent_ground_stays_legible(tmp_path: Path, kind: str) -> None:
    page = Image.new("RGBA", (120, 40), (0, 0, 0, 0))
    ImageDraw.Draw(page).text((10, 10), "Invoice 4711", fill=(0, 0, 0, 255))
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    page.save(tmp_path / "page", kind, **options)
    rgb = page_of(tmp_path / "page")
    assert rgb[0, 0].tolist() == [255] * 3
    assert 0.02 < (rgb < 128).mean() < 0.4  # ink, and not much of it
    assert "white" in spec_of("qwen3_vl").rules.alpha
