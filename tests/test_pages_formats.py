"""Every kind of sample, layout and colour that page files come in gives the right levels."""

from __future__ import annotations

import io
from pathlib import Path

import makers_pages as make
import numpy as np
import pytest
from PIL import Image, features
from test_pages import failure_of, page_of, pages_of, scene

from pipeline.errors import Failure, Reason
from pipeline.pages import MAX_PAGE_PIXELS, Page, count_pages, discover

RAMP = np.arange(64, dtype=np.uint16).reshape(8, 8, 1)


# ---------------------------------------------------------------- PNG


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize(("depth", "step"), [(1, 255), (2, 85), (4, 17), (8, 1), (16, 1)])
def test_gray_png_of_every_depth(tmp_path: Path, depth: int, step: int, interlaced: bool) -> None:
    levels = RAMP * 1021 if depth == 16 else RAMP % 2**depth
    path = make.write(tmp_path / "a.png", make.png(levels, depth, 0, interlaced=interlaced))
    expected = levels >> 8 if depth == 16 else levels * step
    assert np.array_equal(page_of(path), np.repeat(expected, 3, axis=2))


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_palette_png_of_every_depth(tmp_path: Path, depth: int, interlaced: bool) -> None:
    palette = np.random.default_rng(0).integers(0, 256, (2**depth, 3), dtype=np.uint8)
    levels = RAMP % 2**depth
    data = make.png(levels, depth, 3, interlaced=interlaced, chunks=[(b"PLTE", palette.tobytes())])
    assert np.array_equal(page_of(make.write(tmp_path / "a.png", data)), palette[levels[:, :, 0]])


@pytest.mark.parametrize("colour", [2, 4, 6])
def test_colour_png_of_16_bits(tmp_path: Path, colour: int) -> None:
    channels = {2: 3, 4: 2, 6: 4}[colour]
    levels = np.random.default_rng(0).integers(0, 65536, (8, 8, channels), dtype=np.uint16)
    if colour != 2:
        levels[:, :, -1] = 65535
    rgb = page_of(make.write(tmp_path / "a.png", make.png(levels, 16, colour)))
    assert np.array_equal(
        rgb, np.broadcast_to(levels[:, :, : 3 if channels > 2 else 1] >> 8, (8, 8, 3))
    )


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_the_transparent_level_of_a_gray_png_is_white(tmp_path: Path, depth: int) -> None:
    levels = np.array([[[0], [1]]], np.uint16)
    data = make.png(levels, depth, 0, chunks=[(b"tRNS", b"\0\1")])
    (row,) = page_of(make.write(tmp_path / "a.png", data))
    assert row.tolist() == [[0] * 3, [255] * 3]


@pytest.mark.parametrize(("depth", "blue", "red"), [(8, 18, 255), (16, 0x1234, 0xFFFF)])
def test_the_transparent_colour_of_a_png_is_white(
    tmp_path: Path, depth: int, blue: int, red: int
) -> None:
    levels = np.array([[[0, 0, blue], [red, 0, 0]]], np.uint16)
    mark = b"".join(int(level).to_bytes(2, "big") for level in levels[0, 0])
    data = make.png(levels, depth, 2, chunks=[(b"tRNS", mark)])
    (row,) = page_of(make.write(tmp_path / "a.png", data))
    assert row.tolist() == [[255] * 3, [255, 0, 0]]


@pytest.mark.parametrize("interlaced", [False, True])
def test_a_png_whose_data_end_early_is_no_page(tmp_path: Path, interlaced: bool) -> None:
    """Its compressed stream ends well, so that Pillow takes it and leaves the rest black."""
    data = make.png(np.full((40, 40, 1), 200), 8, 0, share=0.5, interlaced=interlaced)
    failure = failure_of(make.write(tmp_path / "a.png", data))
    assert failure.reason is Reason.TRUNCATED


def test_a_png_may_end_in_black(tmp_path: Path) -> None:
    for size in ((1, 1), (7, 5), (400, 300)):
        for interlaced in (False, True):
            data = make.png(np.zeros((*size, 1), np.uint8), 8, 0, interlaced=interlaced)
            assert page_of(make.write(tmp_path / "a.png", data)).shape == (*size, 3)


# ---------------------------------------------------------------- JPEG


def jpeg(path: Path, image: Image.Image, **options: object) -> Path:
    image.save(path, "JPEG", quality=95, **options)
    return path


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_jpeg_baseline_and_progressive(tmp_path: Path, mode: str, progressive: bool) -> None:
    image = scene().convert(mode)
    rgb = page_of(jpeg(tmp_path / "a.jpg", image, progressive=progressive))
    assert np.abs(rgb - np.asarray(image.convert("RGB")).astype(int)).mean() < 2


def inks() -> Image.Image:
    """Cyan, magenta, yellow, black, no ink: 16 × 16 px each."""
    values = np.zeros((16, 80, 4), np.uint8)
    for place in range(4):
        values[:, 16 * place : 16 * place + 16, place] = 255
    return Image.fromarray(values, "CMYK")


PLAIN_INKS = [[0, 255, 255], [255, 0, 255], [255, 255, 0], [0, 0, 0], [255, 255, 255]]


@pytest.mark.parametrize("kind", ["adobe", "no marker", "ycck", "tiff", "jpeg in tiff"])
def test_inks_have_their_colours(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    if "tiff" in kind:
        inks().save(path, "TIFF", compression="jpeg" if "jpeg" in kind else None)
    else:
        jpeg(path, inks())
    if kind == "no marker":  # taken as Adobe writes it, as viewers do
        make.write(path, make.without_adobe(path.read_bytes()))
    if kind == "ycck":
        make.write(path, make.as_ycck(inks()))
    rgb = page_of(path)
    assert np.abs(rgb[8, 8::16].astype(int) - PLAIN_INKS).max() <= 12


def test_tagged_ink_is_shown_by_its_profile(tmp_path: Path) -> None:
    """Cyan ink of this profile is a dull blue, black ink a very dark gray."""
    lab = {
        (0, 0, 0, 0): (255, 128, 128),
        (1, 0, 0, 0): (140, 128, 103),
        (0, 0, 0, 1): (25, 128, 128),
        (1, 1, 1, 1): (25, 128, 128),
    }
    plain = page_of(jpeg(tmp_path / "plain.jpg", inks()))
    path = jpeg(tmp_path / "a.jpg", inks(), icc_profile=make.cmyk_profile(lab))
    cyan, black, white = page_of(path)[8, [8, 56, 72]].astype(int)
    assert white.min() >= 250 and 20 <= black.min() <= black.max() <= 40
    assert plain[8, 8].tolist() == pytest.approx([0, 255, 255], abs=3)
    assert 20 < cyan[0] < cyan[1] < cyan[2] < 235


@pytest.mark.parametrize("profile", ["damaged", "of another space"])
def test_a_profile_that_does_not_fit_is_ignored(tmp_path: Path, profile: str) -> None:
    from PIL import ImageCms

    rgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    data = rgb[:300] if profile == "damaged" else rgb
    path = jpeg(tmp_path / "a.jpg", inks(), icc_profile=data)
    assert np.abs(page_of(path)[8, 8::16].astype(int) - PLAIN_INKS).max() <= 12


def test_a_file_of_several_photos_is_its_first(tmp_path: Path) -> None:
    images = [Image.new("RGB", (32, 32), (200 * number, 0, 0)) for number in range(2)]
    images[0].save(tmp_path / "a.mpo", "MPO", save_all=True, append_images=images[1:])
    assert page_of(tmp_path / "a.mpo").max() == 0


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_a_cut_jpeg_that_was_given_an_end_is_no_page(
    tmp_path: Path, mode: str, progressive: bool
) -> None:
    """libjpeg makes what is missing gray, or leaves its detail out, and says nothing."""
    noise = np.random.default_rng(0).integers(0, 256, (96, 80, 3), dtype=np.uint8)
    path = jpeg(tmp_path / "a.jpg", Image.fromarray(noise).convert(mode), progressive=progressive)
    whole = path.read_bytes()
    for left_out in (len(whole) // 2, len(whole) // 3, 2000):
        make.write(path, whole[:-left_out] + b"\xff\xd9")
        assert failure_of(path).reason is Reason.TRUNCATED, left_out


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 1}])
@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("size", [(1, 1), (16, 16), (37, 51)])
def test_a_jpeg_may_end_in_gray(
    tmp_path: Path, size: tuple[int, int], mode: str, options: dict[str, object]
) -> None:
    for level in (127, 128):
        image = Image.new(mode, size, (level,) * len(Image.new(mode, (1, 1)).getbands()))
        assert page_of(jpeg(tmp_path / "a.jpg", image, **options)).shape == (*size[::-1], 3)


def test_data_behind_the_end_of_a_jpeg_are_no_part_of_it(tmp_path: Path) -> None:
    path = jpeg(tmp_path / "a.jpg", scene())
    expected = page_of(path)
    make.write(path, path.read_bytes() + b"\xff\xda motion \xff\xc2 photo")
    assert np.array_equal(page_of(path), expected)


# ---------------------------------------------------------------- TIFF


BEYOND_PILLOW = ((12, "<", 0), (12, ">", 0), (12, ">", 1), (16, ">", 0))
GRAY_TIFFS = [
    (bits, order, photometric)
    for bits in (1, 2, 4, 8, 12, 16)
    for order in "<>"
    for photometric in (0, 1)
    if (bits, order, photometric) not in BEYOND_PILLOW  # refused by name, see the next test
]


@pytest.mark.parametrize(("bits", "order", "photometric"), GRAY_TIFFS)
def test_gray_tiff_of_every_depth(tmp_path: Path, order: str, photometric: int, bits: int) -> None:
    top = 2**bits - 1
    levels = (np.arange(64).reshape(8, 8) * 1021) % (top + 1)
    strip = levels.astype(f"{order}u2").tobytes()
    if bits <= 8:
        strip = b"".join(make.packed(row, bits) for row in levels)
    if bits == 12:
        strip = b"".join(make.packed_12(row) for row in levels)
    tags = make.gray_tags(8, 8, bits, photometric=[photometric])
    rgb = page_of(make.write(tmp_path / "a.tif", make.tiff([(tags, [strip])], order=order)))
    expected = levels >> (bits - 8) if bits > 8 else levels * 255 // top
    assert np.array_equal(rgb[:, :, 0], 255 - expected if photometric == 0 else expected)


@pytest.mark.parametrize(
    ("what", "tags", "size"),
    [
        ("24 bits", make.gray_tags(8, 8, 24), 192),
        ("12 bits from white", make.gray_tags(8, 8, 12, photometric=[0]), 96),
        ("float of 64 bits", make.gray_tags(8, 8, 64, format=[3]), 512),
        ("an unknown compression", make.gray_tags(8, 8, compression=[31234]), 64),
    ],
)
def test_tiff_beyond_the_decoder_is_unsupported(
    tmp_path: Path, what: str, tags: dict[int, list[int]], size: int
) -> None:
    good = (make.gray_tags(8, 8), [bytes(64)])
    path = make.write(tmp_path / "a.tif", make.tiff([good, (tags, [bytes(size)]), good]))
    first, second, third = pages_of(path)
    assert isinstance(first, Page) and isinstance(third, Page)
    assert isinstance(second, Failure) and second.reason is Reason.UNSUPPORTED, what
    alone = failure_of(make.write(tmp_path / "b.tif", make.tiff([(tags, [bytes(size)])])))
    assert (alone.page, alone.reason) == (None, Reason.UNSUPPORTED)


WIDE = [("<u4", 255, 255), ("<u4", 4e9, 4e9)]  # unsigned ones Pillow reads in this order only
for order in "<>":
    WIDE += [(order + "f4", 1, 1), (order + "f4", 200, 255), (order + "f4", 1e6, 1e6)]
    WIDE += [(order + "i4", 60_000, 65_535), (order + "i2", 32_767, 65_535)]


@pytest.mark.parametrize(("kind", "top", "whole"), WIDE)
def test_wide_levels_are_scaled_by_their_range(
    tmp_path: Path, kind: str, top: float, whole: float
) -> None:
    values = np.linspace(0, top, 256).reshape(16, 16).astype(kind)
    sample_format = {"u": 1, "i": 2, "f": 3}[kind[1]]
    tags = make.gray_tags(16, 16, 8 * int(kind[2]), format=[sample_format])
    data = make.tiff([(tags, [values.tobytes()])], order=kind[0])
    rgb = page_of(make.write(tmp_path / "a.tif", data))
    expected = values * (255.0 / whole)
    assert np.abs(rgb[:, :, 0] - expected).max() <= 0.51


def test_negative_levels_start_at_black(tmp_path: Path) -> None:
    values = np.linspace(-500, 500, 256).reshape(16, 16).astype("<i2")
    tags = make.gray_tags(16, 16, 16, format=[2])
    rgb = page_of(make.write(tmp_path / "a.tif", make.tiff([(tags, [values.tobytes()])])))
    assert (rgb[0, 0, 0], rgb[-1, -1, 0]) == (0, 255)


def test_floats_whose_white_is_zero_are_turned_over(tmp_path: Path) -> None:
    values = np.linspace(0, 1, 256).reshape(16, 16).astype("<f4")
    tags = make.gray_tags(16, 16, 32, format=[3], photometric=[0])
    rgb = page_of(make.write(tmp_path / "a.tif", make.tiff([(tags, [values.tobytes()])])))
    assert np.array_equal(rgb[:, :, 0].ravel(), np.arange(255, -1, -1))


COMPRESSIONS = [
    *[("1", name) for name in ("group3", "group4", "packbits", "tiff_lzw")],
    *[("L", name) for name in ("tiff_lzw", "tiff_deflate", "packbits", "lzma", "jpeg")],
    *[("RGB", name) for name in ("tiff_lzw", "tiff_adobe_deflate", "zstd", "jpeg", "raw")],
    *[("I;16", name) for name in ("tiff_lzw", "tiff_deflate")],
]


@pytest.mark.parametrize(("mode", "compression"), COMPRESSIONS)
def test_tiff_of_every_compression(tmp_path: Path, mode: str, compression: str) -> None:
    image = scene(40, 24).convert(mode if mode != "I;16" else "L")
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 256)
    image.save(tmp_path / "a.tif", compression=compression)
    expected = np.asarray(image) >> 8 if mode == "I;16" else np.asarray(image.convert("RGB"))
    expected = np.repeat(expected[:, :, None], 3, axis=2) if mode == "I;16" else expected
    slack = 4 if compression == "jpeg" else 0
    assert np.abs(page_of(tmp_path / "a.tif") - expected.astype(int)).mean() <= slack


@pytest.mark.parametrize(
    ("mode", "compression"), [pair for pair in COMPRESSIONS if pair[0] != "I;16"]
)
def test_a_cut_tiff_of_any_compression_is_no_page(
    tmp_path: Path, mode: str, compression: str
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    tags, strips = make.strips_of(Image.fromarray(noise).convert(mode), compression)
    data = make.tiff([(tags, strips)])
    assert isinstance(pages_of(make.write(tmp_path / "a.tif", data))[0], Page)
    for share in (0.4, 0.7, 0.95):
        make.write(tmp_path / "a.tif", data[: int(len(data) * share)])
        assert failure_of(tmp_path / "a.tif").reason is Reason.TRUNCATED, share


def test_a_raw_tiff_with_too_few_strips_is_no_page(tmp_path: Path) -> None:
    tags = make.gray_tags(8, 64) | {278: [16]}
    whole = make.tiff([(tags, [b"\x80" * 128] * 4)])
    assert page_of(make.write(tmp_path / "a.tif", whole)).min() == 0x80
    short = make.tiff([(tags, [b"\x80" * 128] * 3)])
    failure = failure_of(make.write(tmp_path / "a.tif", short))
    assert (failure.reason, failure.detail) == (
        Reason.TRUNCATED,
        "its strips hold 384 of 512 pixels",
    )


def test_a_tiled_tiff(tmp_path: Path) -> None:
    values = np.arange(48 * 40, dtype=np.uint32).reshape(48, 40).astype(np.uint8)
    padded = np.pad(values, ((0, 0), (0, 8)))
    tiles = [
        padded[top : top + 16, left : left + 16].tobytes()
        for top in range(0, 48, 16)
        for left in range(0, 48, 16)
    ]
    tags = make.gray_tags(40, 48) | {322: [16], 323: [16]}
    del tags[278]
    path = make.write(tmp_path / "a.tif", make.tiff([(tags, tiles)], tiled=True))
    assert np.array_equal(page_of(path)[:, :, 0], values)


def test_separate_planes_of_a_tiff(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    tags = make.gray_tags(8, 8, photometric=[2]) | {258: [8] * 3, 277: [3], 284: [2]}
    planes = [values[:, :, channel].tobytes() for channel in range(3)]
    path = make.write(tmp_path / "a.tif", make.tiff([(tags, planes)]))
    assert np.array_equal(page_of(path), values)


def test_lab_tiff(tmp_path: Path) -> None:
    tags = make.gray_tags(8, 8, photometric=[8]) | {258: [8] * 3, 277: [3]}
    lab = np.zeros((8, 8, 3), np.uint8)
    lab[:4, :, 0] = 255
    rgb = page_of(make.write(tmp_path / "a.tif", make.tiff([(tags, [lab.tobytes()])])))
    assert rgb[0].min() >= 253 and rgb[-1].max() <= 2


def test_a_codec_that_libtiff_lacks_is_unsupported(tmp_path: Path) -> None:
    """WebP in TIFF, of which not every build of libtiff knows."""
    from pipeline.pages.images import _has_codec

    tags = make.gray_tags(8, 8, compression=[50_001], photometric=[2]) | {258: [8] * 3, 277: [3]}
    failure = failure_of(make.write(tmp_path / "a.tif", make.tiff([(tags, [bytes(64)])])))
    known = _has_codec("webp")
    assert failure.reason is (Reason.CORRUPT if known else Reason.UNSUPPORTED)
    assert known or failure.detail == "libtiff was built without webp"


def test_a_loop_of_directories_ends(tmp_path: Path) -> None:
    page = (make.gray_tags(8, 8), [bytes(64)])
    for loop_to in (0, 1, 2):
        path = make.write(tmp_path / "a.tif", make.tiff([page] * 3, loop_to=loop_to))
        assert [page.page for page in pages_of(path)] == [1, 2, 3]
        assert count_pages(discover([path]).files[0]) == 3


def test_a_tiff_of_absurdly_many_directories_is_refused(tmp_path: Path) -> None:
    page = (make.gray_tags(8, 8), [b""])
    path = make.write(tmp_path / "a.tif", make.tiff([page] * 20_001))
    failure = failure_of(path)
    assert (failure.page, failure.reason) == (None, Reason.TOO_LARGE)
    assert failure.detail == "20,001 pages or more are above 20,000"


def test_500_pages_of_a_tiff_come_one_by_one(tmp_path: Path) -> None:
    pages = [
        (make.gray_tags(8, 8 + number % 5), [bytes([number % 256]) * 8 * (8 + number % 5)])
        for number in range(500)
    ]
    path = make.write(tmp_path / "a.tif", make.tiff(pages))
    seen = [(page.rgb.shape[0], int(page.rgb[0, 0, 0])) for page in pages_of(path)]  # type: ignore[union-attr]
    assert seen == [(8 + number % 5, number % 256) for number in range(500)]


# ---------------------------------------------------------------- others


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA"])
def test_bmp(tmp_path: Path, mode: str) -> None:
    image = scene(37, 20).convert(mode)
    image.save(tmp_path / "a.bmp")
    assert np.array_equal(page_of(tmp_path / "a.bmp"), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("interlace", [0, 1])
def test_gif(tmp_path: Path, interlace: int) -> None:
    image = scene(37, 20).convert("P")
    image.save(tmp_path / "a.gif", interlace=interlace)
    assert np.array_equal(page_of(tmp_path / "a.gif"), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "I;16"])
def test_jpeg_2000(tmp_path: Path, mode: str) -> None:
    image = scene(64, 48).convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    image.save(tmp_path / "a.jp2")
    expected = scene(64, 48).convert("L" if mode in ("L", "I;16") else "RGB").convert("RGB")
    assert np.abs(page_of(tmp_path / "a.jp2") - np.asarray(expected).astype(int)).max() <= 1


@pytest.mark.skipif(not features.check("avif"), reason="Pillow was built without AVIF")
@pytest.mark.parametrize("orientation", range(1, 9))
def test_avif_upright(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = scene()
    image.save(tmp_path / "a.avif", quality=95, exif=exif)
    stored = page_of(tmp_path / "a.avif")
    assert stored.shape == ((96, 64, 3) if orientation >= 5 else (64, 96, 3))


@pytest.mark.parametrize("kind", ["WEBP", "JPEG2000", "J2K", "AVIF", "PNG", "JPEG", "GIF", "BMP"])
def test_a_cut_file_is_called_truncated(tmp_path: Path, kind: str) -> None:
    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("Pillow was built without AVIF")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    out = io.BytesIO()
    options = {"no_jp2": True} if kind == "J2K" else {}  # a code stream without a box around it
    Image.fromarray(noise).save(out, "JPEG2000" if kind == "J2K" else kind, **options)
    for share in (0.5, 0.95):
        path = make.write(tmp_path / "a", out.getvalue()[: int(len(out.getvalue()) * share)])
        assert failure_of(path).reason is Reason.TRUNCATED, share


def test_an_avif_too_large_says_so_though_its_decoder_does_not(tmp_path: Path) -> None:
    head = b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf"
    sizes = b"".join(
        b"\0\0\0\x14ispe\0\0\0\0" + side.to_bytes(4, "big") * 2 for side in (160, 20_000, 320)
    )
    for name, brand in (("a.avif", b"avif"), ("a.heic", b"heic")):
        path = make.write(tmp_path / name, head.replace(b"ftypavif", b"ftyp" + brand) + sizes)
        failure = failure_of(path)
        assert failure.reason is Reason.TOO_LARGE
        assert failure.detail == f"20000 x 20000 px is above {MAX_PAGE_PIXELS:,} pixels"


def test_heic_without_a_decoder_is_unsupported(tmp_path: Path) -> None:
    path = make.write(tmp_path / "a.heic", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    assert failure_of(path).reason is Reason.UNSUPPORTED


# ---------------------------------------------------------------- narrow pages


@pytest.mark.parametrize("size", [(8, 8192), (3, 62728), (601, 3), (1, 201)])
@pytest.mark.parametrize("kind", ["png", "tiff", "damaged"])
def test_a_narrow_page_is_refused_by_its_header(
    tmp_path: Path, size: tuple[int, int], kind: str
) -> None:
    from pipeline.pages import decode_pages

    width, height = size
    if kind == "tiff":
        data = make.tiff([(make.gray_tags(width, height), [bytes(width * height)])])
    else:
        data = make.png(np.zeros((height, width, 1), np.uint8), 8, 0)
    if kind == "damaged":
        data = data[:43]  # two bytes of its pixels
    (file,) = discover([make.write(tmp_path / "a", data)]).files
    (failure,) = decode_pages(file)
    assert isinstance(failure, Failure)
    assert (failure.page, failure.reason) == (1, Reason.ASPECT_RATIO)
    ratio = max(size) / min(size)
    assert failure.detail == f"aspect ratio {ratio:.1f} of {width} x {height} px is above 200"


def test_a_page_of_just_200_to_1_is_taken(tmp_path: Path) -> None:
    from pipeline.pages import decode_pages

    data = make.png(np.zeros((200, 1, 1), np.uint8), 8, 0)
    (file,) = discover([make.write(tmp_path / "a.png", data)]).files
    assert [type(page) for page in decode_pages(file)] == [Page]
