"""A page comes out whole and upright, or as a named failure; the rest goes on."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFile

from pipeline.errors import Failure, Reason, Stage
from pipeline.keys import RenderSpec
from pipeline.pages import DEFAULT_DPI, RULES, Page, SourceFile, decode_pages, discover
from pipeline.pages.find import kind_of


def scene(width: int = 96, height: int = 64) -> Image.Image:
    """A picture without any symmetry, in soft colours that survive JPEG."""
    columns, rows = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    planes = [200 * columns + 20, 200 * rows + 20, 120 * columns * rows + 60]
    return Image.fromarray(np.stack(planes, axis=2).astype(np.uint8))


def pages_of(path: Path, dpi: int = DEFAULT_DPI, **render: Any) -> list[Page | Failure]:
    """Everything that discovering and decoding one file gives."""
    found = discover([path])
    spec = RenderSpec(RULES, dpi, **render)
    decoded = [page for file in found.files for page in decode_pages(file, spec)]
    return [*found.failures, *decoded]


def page_of(path: Path) -> np.ndarray:
    """The pixels of a file that holds one good page."""
    (page,) = pages_of(path)
    assert isinstance(page, Page), page
    return page.rgb


def failure_of(path: Path) -> Failure:
    (failure,) = pages_of(path)
    assert isinstance(failure, Failure)
    return failure


def simple_pdf(path: Path, pages: int = 1, extra: bytes = b"", media: str = "0 0 144 72") -> Path:
    """A PDF of black rectangles whose place tells the page number."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>"]
    kids = " ".join(f"{3 + 2 * number} 0 R" for number in range(pages))
    objects.append(f"<< /Type /Pages /Kids [{kids}] /Count {pages} >>".encode())
    for number in range(pages):
        content = f"0 0 0 rg {10 + 20 * number} 10 10 50 re f".encode()
        head = f"<< /Type /Page /Parent 2 0 R /MediaBox [{media}] /Contents {4 + 2 * number} 0 R "
        objects.append(head.encode() + extra + b">>")
        objects.append(b"<< /Length %d >> stream\n%b\nendstream" % (len(content), content))
    body, places = b"%PDF-1.4\n", []
    for number, text in enumerate(objects, start=1):
        places.append(len(body))
        body += b"%d 0 obj %b endobj\n" % (number, text)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    body += b"xref\n0 %d\n0000000000 65535 f \n%b" % (len(objects) + 1, table)
    body += b"trailer << /Root 1 0 R /Size %d >>\n" % (len(objects) + 1)
    body += b"startxref\n%d\n%%%%EOF\n" % (len(body) - len(table) - 20)
    path.write_bytes(body)
    return path


# ---------------------------------------------------------------- discovery


def test_a_directory_is_searched_in_natural_order(tmp_path: Path) -> None:
    for name in ("page10.png", "page2.png", "b/page1.png", "a.png", "A.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        scene().save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no page")
    (tmp_path / "README").write_text("BM is how a note begins, and no bitmap")
    (tmp_path / ".hidden.png").write_bytes((tmp_path / "a.png").read_bytes())
    found = discover([tmp_path])
    names = [file.path.relative_to(tmp_path).as_posix() for file in found.files]
    assert names == ["A.png", "a.png", "b/page1.png", "page2.png", "page10.png"]
    assert (found.skipped, found.failures) == (2, ())


def test_named_paths_keep_their_order_and_count_once(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        scene().save(tmp_path / name)
    found = discover([tmp_path / "b.png", tmp_path, tmp_path / "b.png"])
    assert [file.path.name for file in found.files] == ["b.png", "a.png"]


def test_loops_of_links_are_harmless(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    scene().save(tmp_path / "a" / "b" / "page.png")
    (tmp_path / "a" / "b" / "up").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "dangling.png").symlink_to(tmp_path / "nowhere")
    found = discover([tmp_path])
    assert [file.path.name for file in found.files] == ["page.png"]
    assert [failure.reason for failure in found.failures] == [Reason.NOT_FOUND]


def test_a_name_too_long_is_a_failure() -> None:
    (failure,) = discover(["a" * 300]).failures
    assert (failure.reason, failure.detail) == (Reason.UNREADABLE, "File name too long")


def test_directories_may_nest_deeper_than_calls(tmp_path: Path) -> None:
    scene().save(tmp_path / "page.png")
    above, limit = Path.cwd(), sys.getrecursionlimit()
    os.chdir(tmp_path)
    try:
        for _ in range(400):
            os.mkdir("d")
            os.chdir("d")
        os.link(tmp_path / "page.png", "below.png")
    finally:
        os.chdir(above)
    sys.setrecursionlimit(350)
    try:
        found = discover([tmp_path])
    finally:
        sys.setrecursionlimit(limit)
    subprocess.run(["rm", "-r", tmp_path / "d"], check=True)  # too deep for pytest as well
    assert [file.path.name for file in found.files] == ["below.png", "page.png"]


def test_a_tiff_is_decoded_from_bytes_of_our_own(tmp_path: Path) -> None:
    """libtiff maps a file; one that is cut off meanwhile would end the process."""
    frames = [scene(), scene(64, 32)]
    frames[0].save(
        tmp_path / "a.tif", save_all=True, append_images=frames[1:], compression="tiff_lzw"
    )
    pages = decode_pages(SourceFile(tmp_path / "a.tif", "tiff"))
    assert isinstance(next(pages), Page)
    os.truncate(tmp_path / "a.tif", 100)
    assert [isinstance(page, Page) for page in pages] == [True]


@pytest.mark.parametrize("kind", ["tif", "bmp"])
def test_a_file_cut_off_while_it_is_decoded_does_not_end_the_process(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / f"page.{kind}"
    Image.new("L", (2000, 2000)).save(path)
    code = (
        "import os, sys\nfrom pipeline.pages import decode_pages, discover, images\n"
        "original = images.rgb_pixels\n"
        "images.rgb_pixels = lambda *image: os.truncate(sys.argv[1], 100) or original(*image)\n"
        "print(*(type(page).__name__ for page in decode_pages(discover(sys.argv[1:]).files[0])))"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "Page\n"), done.stderr


ERRORS = [
    (MemoryError(), Reason.UNREADABLE, Stage.READ),
    (OSError(errno.EIO, "Input/output error"), Reason.UNREADABLE, Stage.READ),
    (OSError("image file is truncated"), Reason.TRUNCATED, Stage.DECODE),
]


@pytest.mark.parametrize(("error", "reason", "stage"), ERRORS, ids=["memory", "disk", "file"])
def test_what_the_machine_did_not_give_is_no_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: Reason, stage: Stage
) -> None:
    def failing(image: Image.Image) -> None:
        raise error

    scene().save(tmp_path / "a.png")
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", failing)
    failure = failure_of(tmp_path / "a.png")
    assert (failure.reason, failure.stage) == (reason, stage)
    assert failure.retryable == (stage is Stage.READ)


def test_the_content_tells_the_type_and_not_the_name(tmp_path: Path) -> None:
    for kind in ("PNG", "JPEG", "TIFF", "WEBP", "BMP", "GIF", "JPEG2000"):
        scene().save(tmp_path / f"{kind.lower()}.txt", format=kind)
    simple_pdf(tmp_path / "pdf.jpg")
    kinds = [file.kind for file in discover([tmp_path]).files]
    assert sorted(kinds) == ["bmp", "gif", "jp2", "jpeg", "pdf", "png", "tiff", "webp"]


@pytest.mark.parametrize(
    ("name", "content", "stage", "reason"),
    [
        ("missing.png", None, Stage.READ, Reason.NOT_FOUND),
        ("notes.txt", b"hello", Stage.DECODE, Reason.UNSUPPORTED),
        ("empty.pdf", b"", Stage.DECODE, Reason.CORRUPT),
        ("page.png", b"no picture at all", Stage.DECODE, Reason.CORRUPT),
    ],
)
def test_a_named_file_without_pages_is_a_failure(
    tmp_path: Path, name: str, content: bytes | None, stage: Stage, reason: Reason
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    failure = failure_of(tmp_path / name)
    assert (failure.file, failure.page) == (str(tmp_path / name), None)
    assert (failure.stage, failure.reason) == (stage, reason)


def test_in_a_directory_a_damaged_page_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "scan.pdf").write_bytes(b"")
    (tmp_path / "scan.xyz").write_bytes(b"")
    found = discover([tmp_path])
    assert [Path(str(failure.file)).name for failure in found.failures] == ["scan.pdf"]
    assert found.skipped == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_a_failure(tmp_path: Path) -> None:
    scene().save(tmp_path / "page.png")
    (tmp_path / "page.png").chmod(0)
    assert failure_of(tmp_path / "page.png").reason is Reason.UNREADABLE


def test_names_of_any_bytes_are_found(tmp_path: Path) -> None:
    name = os.fsdecode(b"p\xff \n#%41?.png")
    scene().save(tmp_path / name)
    assert [file.path.name for file in discover([tmp_path]).files] == [name]


# ---------------------------------------------------------------- orientation


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_each_orientation_gives_the_same_page_once_turned(
    tmp_path: Path, kind: str, orientation: int
) -> None:
    upright = scene()
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(undo[orientation]) if orientation in undo else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    stored.save(tmp_path / "page", format=kind, exif=exif, **options)
    rgb = page_of(tmp_path / "page")
    assert rgb.shape == (64, 96, 3)
    assert np.abs(rgb.astype(int) - np.asarray(upright)).mean() < (4 if kind == "JPEG" else 0.01)


def test_an_illegal_orientation_is_ignored(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 0
    scene().save(tmp_path / "page.jpg", exif=exif)
    assert page_of(tmp_path / "page.jpg").shape == (64, 96, 3)


# ---------------------------------------------------------------- colour and depth


def test_transparency_is_composited_on_white(tmp_path: Path) -> None:
    """Black text on a transparent ground whose hidden colour is black too."""
    image = Image.new("RGBA", (40, 20), (0, 0, 0, 0))
    ImageDraw.Draw(image).rectangle((10, 5, 19, 14), fill=(0, 0, 0, 255))
    image.putpixel((0, 0), (0, 0, 0, 128))
    image.save(tmp_path / "page.png")
    rgb = page_of(tmp_path / "page.png")
    assert rgb[10, 15].tolist() == [0, 0, 0] and rgb[10, 30].tolist() == [255, 255, 255]
    assert abs(int(rgb[0, 0, 0]) - 127) <= 1


@pytest.mark.parametrize("mode", ["P", "LA", "PA"])
def test_transparency_of_other_modes_is_white_too(tmp_path: Path, mode: str) -> None:
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0)).convert(mode)
    if mode == "P":
        image.info["transparency"] = image.getpixel((0, 0))
    image.save(tmp_path / "page", format="PNG" if mode != "PA" else "TIFF")
    assert page_of(tmp_path / "page").min() == 255


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bits_are_scaled_and_not_clipped(tmp_path: Path, kind: str) -> None:
    values = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    Image.fromarray(values).save(tmp_path / "page", format=kind)
    rgb = page_of(tmp_path / "page")
    assert np.array_equal(rgb[:, :, 1], values >> 8)
    assert (rgb == 255).all(axis=2).mean() < 0.02


def test_16_bits_of_the_other_byte_order_are_scaled(tmp_path: Path) -> None:
    values = np.arange(0, 65536, 1024, dtype=np.uint16).reshape(8, 8)
    strip = values.astype(">u2").tobytes()
    tags = [(256, 8), (257, 8), (258, 16), (259, 1), (262, 1), (273, 134), (277, 1), (278, 8)]
    tags += [(279, len(strip))]
    ifd = struct.pack(">H", len(tags))
    ifd += b"".join(struct.pack(">HHII", tag, 4, 1, value) for tag, value in tags)
    data = b"MM\x00\x2a" + struct.pack(">I", 8) + ifd + b"\0" * 4
    (tmp_path / "page.tif").write_bytes(data.ljust(134, b"\0") + strip)
    assert np.array_equal(page_of(tmp_path / "page.tif")[:, :, 0], values >> 8)


@pytest.mark.parametrize("top", [1.0, 255.0, 65535.0, 1e6])
def test_floats_are_scaled_by_their_range(tmp_path: Path, top: float) -> None:
    values = np.linspace(0, top, 256, dtype=np.float32).reshape(16, 16)
    Image.fromarray(values).save(tmp_path / "page.tif")
    assert np.array_equal(page_of(tmp_path / "page.tif")[:, :, 0].ravel(), np.arange(256))


def test_floats_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.full((8, 8), np.nan, np.float32)).save(tmp_path / "page.tif")
    assert failure_of(tmp_path / "page.tif").reason is Reason.CORRUPT


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK"])
def test_every_usual_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    image = Image.new("RGB", (20, 10), "white")
    ImageDraw.Draw(image).rectangle((0, 0, 9, 9), fill="black")
    image.convert(mode).save(tmp_path / "page.tif")
    rgb = page_of(tmp_path / "page.tif")
    assert rgb.dtype == np.uint8 and rgb.shape == (10, 20, 3)
    assert rgb[5, 2].max() < 60 and rgb[5, 17].min() == 255


# ---------------------------------------------------------------- several pages


def test_each_frame_of_a_tiff_has_its_own_size_and_content(tmp_path: Path) -> None:
    frames = [Image.new("L", (30 + 10 * number, 20), 50 * number) for number in range(4)]
    frames[0].save(tmp_path / "pages.tif", save_all=True, append_images=frames[1:])
    pages = pages_of(tmp_path / "pages.tif")
    assert [page.page for page in pages] == [1, 2, 3, 4]
    seen = [(page.rgb.shape[1], int(page.rgb[0, 0, 0])) for page in pages if isinstance(page, Page)]
    assert seen == [(30, 0), (40, 50), (50, 100), (60, 150)]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_one_page_its_first_image(tmp_path: Path, kind: str) -> None:
    frames = [Image.new("RGB", (32, 32), (200 * number, 0, 0)) for number in range(3)]
    options = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(
        tmp_path / "page", format=kind, save_all=True, append_images=frames[1:], **options
    )
    assert page_of(tmp_path / "page").max() == 0


def test_pages_of_a_pdf_in_order_at_the_asked_resolution(tmp_path: Path) -> None:
    path = simple_pdf(tmp_path / "three.pdf", pages=3)
    for dpi, size in ((72, (72, 144)), (144, (144, 288))):
        pages = pages_of(path, dpi=dpi)
        assert [page.page for page in pages] == [1, 2, 3]
        for number, page in enumerate(pages):
            assert isinstance(page, Page) and page.rgb.shape == (*size, 3)
            row = page.rgb[size[0] // 2, :, 0]
            assert row[(15 + 20 * number) * dpi // 72] == 0
            assert (row == 0).sum() == 10 * dpi // 72


def test_a_rotated_pdf_page_is_rendered_as_it_is_shown(tmp_path: Path) -> None:
    path = simple_pdf(tmp_path / "rotated.pdf", extra=b"/Rotate 90 ")
    (page,) = pages_of(path, dpi=72)
    assert isinstance(page, Page) and page.rgb.shape == (144, 72, 3)


@pytest.mark.parametrize("kind", ["tiff", "pdf"])
def test_only_the_asked_pages_come_and_absent_ones_fail(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "pages"
    if kind == "pdf":
        simple_pdf(path, pages=3)
    else:
        frames = [Image.new("L", (20, 20), 9 * number) for number in range(3)]
        frames[0].save(path, format="TIFF", save_all=True, append_images=frames[1:])
    pages = list(decode_pages(SourceFile(path, kind), only=frozenset({2, 7})))
    assert [page.page for page in pages] == [2, 7]
    assert isinstance(pages[0], Page)
    assert isinstance(pages[1], Failure) and pages[1].reason is Reason.NO_SUCH_PAGE
    assert pages[1].detail == "the file has 3 pages"


def test_values_of_form_fields_are_drawn(tmp_path: Path) -> None:
    """Without form drawing this page is white: the field's text is in no content stream."""
    plain = simple_pdf(tmp_path / "form.pdf").read_bytes()
    form = b"/AcroForm << /Fields [6 0 R] /DA (/Helv 12 Tf 0 g) >> >>"
    field = (
        b"6 0 obj << /Type /Annot /Subtype /Widget /FT /Ch /Ff 131072 /T (f) /V (MMMMM)"
        b" /Opt [(MMMMM)] /Rect [60 20 140 50] /P 3 0 R /DA (/Helv 12 Tf 0 g) /F 4 >> endobj\n"
    )
    changed = plain.replace(b"/Pages 2 0 R >>", b"/Pages 2 0 R " + form)
    changed = changed.replace(b"/Contents 4 0 R ", b"/Contents 4 0 R /Annots [6 0 R] ")
    start = changed.index(b"xref")
    (tmp_path / "form.pdf").write_bytes(changed[:start] + field + b"trailer << /Root 1 0 R >>\n")
    (page,) = pages_of(tmp_path / "form.pdf", dpi=72)
    assert isinstance(page, Page)
    assert (page.rgb[22:52, 60:140] != 255).any()


# ---------------------------------------------------------------- damage and size


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP", "BMP", "GIF", "JPEG2000"])
def test_a_truncated_file_is_one_failure_and_no_page(tmp_path: Path, kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (200, 200, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "page", format=kind)
    whole = (tmp_path / "page").read_bytes()
    for share in (0.3, 0.6, 0.9):
        (tmp_path / "page").write_bytes(whole[: int(len(whole) * share)])
        failure = failure_of(tmp_path / "page")
        assert failure.stage is Stage.DECODE
        assert failure.reason in (Reason.TRUNCATED, Reason.CORRUPT)


def test_importing_the_package_flips_no_global_switch() -> None:
    code = (
        "from PIL import Image, ImageFile; before = Image.MAX_IMAGE_PIXELS\n"
        "import pipeline.pages, pipeline.encode, pipeline.cli.encode\n"
        "assert not ImageFile.LOAD_TRUNCATED_IMAGES and Image.MAX_IMAGE_PIXELS == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


def huge_png(path: Path, width: int, height: int) -> Path:
    """A PNG whose header claims a size that its data do not have."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = (
        chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    return path


@pytest.mark.parametrize("size", [(65_536, 65_536), (12_000, 12_000), (100_001, 1000)])
def test_a_page_too_large_is_refused_from_its_header(tmp_path: Path, size: tuple[int, int]) -> None:
    import tracemalloc

    path = huge_png(tmp_path / "page.png", *size)
    pages_of(huge_png(tmp_path / "small.png", 10, 10))  # decoders are imported by now
    tracemalloc.start()
    failure = failure_of(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert failure.reason is Reason.TOO_LARGE
    assert str(size[0]) in failure.detail or str(size[0] * size[1]) in failure.detail
    assert peak < 5_000_000


def test_a_pdf_page_too_large_is_refused_before_it_is_rendered(tmp_path: Path) -> None:
    path = simple_pdf(tmp_path / "large.pdf", media="0 0 14400 14400")
    failure = failure_of(path)
    assert failure.reason is Reason.TOO_LARGE
    assert failure.detail == "40000 x 40000 px at 200 dpi is above 100,000,000 pixels"


def test_a_damaged_page_costs_itself_and_not_its_neighbours(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (3, 60, 60), dtype=np.uint8)
    frames = [Image.fromarray(values) for values in noise]
    path = tmp_path / "pages.tif"
    frames[0].save(path, save_all=True, append_images=frames[1:], compression="tiff_deflate")
    data = bytearray(path.read_bytes())
    with Image.open(path) as image:
        image.seek(1)
        (offset,) = image.tag_v2[273]
    data[offset : offset + 2000] = b"\xff" * 2000
    path.write_bytes(data)
    pages = pages_of(path)
    assert [type(page) for page in pages] == [Page, Failure, Page]
    assert [page.page for page in pages] == [1, 2, 3]


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"%PDF-1.4\nnothing else", Reason.CORRUPT), (b"%PDF-1.7\n" + b"\0" * 5000, Reason.CORRUPT)],
)
def test_a_broken_pdf_is_one_failure(tmp_path: Path, content: bytes, reason: Reason) -> None:
    (tmp_path / "page.pdf").write_bytes(content)
    failure = failure_of(tmp_path / "page.pdf")
    assert (failure.page, failure.reason) == (None, reason)


def test_kind_of_needs_more_than_two_letters_for_a_bitmap() -> None:
    assert kind_of(b"BM, the British Museum, ...") is None
    assert kind_of(b"") is None
