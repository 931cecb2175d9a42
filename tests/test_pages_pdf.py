"""PDF pages as viewers show them: boxes, forms, stamps, passwords; or refused by name."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import makers_pages as make
import numpy as np
import pytest
from pypdfium2 import raw
from test_pages import failure_of, page_of, pages_of, simple_pdf

from pipeline.errors import Failure, Reason
from pipeline.keys import RenderSpec, pixel_digest
from pipeline.pages import RULES, Page, SourceFile, count_pages, decode_pages

BLACK = b"0 0 0 rg "


def shown(path: Path, dpi: int = 72) -> np.ndarray:
    (page,) = pages_of(path, dpi=dpi)
    assert isinstance(page, Page), page
    return page.rgb


def test_the_crop_box_is_what_is_shown(tmp_path: Path) -> None:
    boxes = b"/MediaBox [0 0 200 100] /CropBox [50 20 150 90] "
    data = make.one_page_pdf(boxes, BLACK + b"50 20 10 70 re f")
    rgb = shown(make.write(tmp_path / "a.pdf", data))
    assert rgb.shape == (70, 100, 3)
    assert rgb[:, :10].max() == 0 and rgb[:, 11:].min() == 255


@pytest.mark.parametrize(("turn", "corner"), [(0, "bl"), (90, "tl"), (180, "tr"), (270, "br")])
def test_rotation_turns_the_page_clockwise(tmp_path: Path, turn: int, corner: str) -> None:
    entries = b"/MediaBox [0 0 100 60] /Rotate %d " % turn
    rgb = shown(
        make.write(tmp_path / "a.pdf", make.one_page_pdf(entries, BLACK + b"0 0 20 20 re f"))
    )
    assert rgb.shape == ((60, 100, 3) if turn % 180 == 0 else (100, 60, 3))
    row = 5 if corner[0] == "t" else -5
    column = 5 if corner[1] == "l" else -5
    assert rgb[row, column].max() == 0 and (rgb == 0).mean() < 0.1


def test_a_page_without_paint_is_white(tmp_path: Path) -> None:
    assert shown(make.write(tmp_path / "a.pdf", make.one_page_pdf())).min() == 255


def test_a_stamp_is_drawn(tmp_path: Path) -> None:
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 144 72] /Annots [4 0 R] >>",
        b"<< /Type /Annot /Subtype /Stamp /Rect [20 20 60 50] /F 4 /AP << /N 5 0 R >> >>",
        b"<< /Type /XObject /Subtype /Form /BBox [0 0 40 30] /Length 26 >> stream\n"
        b"0 0 0 rg 0 0 40 30 re f   \nendstream",
    ]
    rgb = shown(make.write(tmp_path / "a.pdf", make.pdf(objects)))
    assert rgb[72 - 40, 40].max() == 0 and rgb[5, 100].min() == 255


def test_a_form_that_can_not_be_drawn_does_not_cost_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pypdfium2 import PdfiumError

    def failing(document: object) -> None:
        raise PdfiumError("no form environment")

    monkeypatch.setattr("pypdfium2.PdfDocument.init_forms", failing)
    path = make.write(tmp_path / "a.pdf", make.one_page_pdf(content=BLACK + b"0 0 40 40 re f"))
    assert shown(path).min() == 0


def test_a_password_is_asked_for_by_name(tmp_path: Path) -> None:
    path = make.write(tmp_path / "a.pdf", make.encrypted_pdf(b"secret"))
    failure = failure_of(path)
    assert (failure.page, failure.reason) == (None, Reason.ENCRYPTED)
    assert "password" in failure.detail.lower()


def test_a_document_that_opens_without_a_password_is_read(tmp_path: Path) -> None:
    rgb = shown(make.write(tmp_path / "a.pdf", make.encrypted_pdf(b"")))
    assert rgb[-20, 20].max() == 0 and rgb[5, 100].min() == 255


@pytest.mark.parametrize("before", [b"%PDF-1.4 damaged", make.encrypted_pdf(b"secret")])
def test_a_document_without_pages_is_refused(tmp_path: Path, before: bytes) -> None:
    """PDFium keeps its last error; that of a file read before must not be taken for this one's."""
    pages_of(make.write(tmp_path / "before.pdf", before))
    empty = [b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [] /Count 0 >>"]
    failure = failure_of(make.write(tmp_path / "a.pdf", make.pdf(empty)))
    assert (failure.page, failure.reason) == (None, Reason.CORRUPT)
    assert failure.detail == "the document has no pages"


@pytest.mark.parametrize("count", [b"-1", b"0", b"1000000000"])
def test_a_count_that_is_wrong_gives_no_phantom_pages(tmp_path: Path, count: bytes) -> None:
    data = make.one_page_pdf().replace(b"/Count 1", b"/Count " + count)
    path = make.write(tmp_path / "a.pdf", data)
    assert [page.page for page in pages_of(path)] == [1]


@pytest.mark.parametrize(
    ("box", "reason", "number"),
    [
        (b"0 0 14400 14400", Reason.TOO_LARGE, "40000 x 40000 px"),
        (b"0 0 99999999 99999999", Reason.TOO_LARGE, "is above 100,000,000 pixels"),
        (b"0 0 14000 14", Reason.ASPECT_RATIO, "aspect ratio 997.2"),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, box: bytes, reason: Reason, number: str
) -> None:
    monkeypatch.setattr("pypdfium2.raw.FPDF_RenderPageBitmap", None)
    path = make.write(tmp_path / "a.pdf", make.one_page_pdf(b"/MediaBox [%b] " % box))
    (failure,) = decode_pages(SourceFile(path, "pdf"))
    assert isinstance(failure, Failure) and failure.reason is reason
    assert number in failure.detail


def test_a_page_of_less_than_a_pixel_is_one_pixel(tmp_path: Path) -> None:
    path = make.write(tmp_path / "a.pdf", make.one_page_pdf(b"/MediaBox [0 0 0.2 0.2] "))
    outcomes = pages_of(path)
    assert isinstance(outcomes[0], Page) and outcomes[0].rgb.shape == (1, 1, 3)


def test_a_document_cut_short_is_truncated(tmp_path: Path) -> None:
    whole = simple_pdf(tmp_path / "a.pdf", pages=5).read_bytes()
    for share in (0.2, 0.5, 0.8):
        path = make.write(tmp_path / "a.pdf", whole[: int(len(whole) * share)])
        assert failure_of(path).reason is Reason.TRUNCATED, share


def test_a_web_document_shorter_than_it_says_is_truncated(tmp_path: Path) -> None:
    """PDFium shows such a file's first pages and says nothing of the rest."""
    whole = make.one_page_pdf().replace(b"/Type /Cat", b"/Linearized 1 /L 0000 /Type /Cat")
    right = whole.replace(b"/L 0000", b"/L %04d" % len(whole))
    assert page_of(make.write(tmp_path / "a.pdf", right)).min() == 255
    cut = whole.replace(b"/L 0000", b"/L %04d" % (len(whole) + 1))
    assert failure_of(make.write(tmp_path / "a.pdf", cut)).reason is Reason.TRUNCATED


def test_rendering_in_threads_gives_the_same_pages_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PDFium is not thread-safe: two threads in it make good files fail, or end the process."""
    inside, most = 0, 0
    render = raw.FPDF_RenderPageBitmap

    def watched(*arguments: Any) -> Any:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.001)  # lets the other threads in, if they can
        try:
            return render(*arguments)
        finally:
            inside -= 1

    monkeypatch.setattr("pypdfium2.raw.FPDF_RenderPageBitmap", watched)
    paths = [simple_pdf(tmp_path / f"{number}.pdf", pages=1 + number % 3) for number in range(8)]

    def digests(path: Path) -> list[str]:
        pages = decode_pages(SourceFile(path, "pdf"), RenderSpec(RULES, 72))
        return [pixel_digest(page.rgb) if isinstance(page, Page) else str(page) for page in pages]

    expected = [digests(path) for path in paths]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            assert list(pool.map(digests, paths)) == expected
    assert most == 1


MEASURE = """
import json, sys

def high_water_mark():  # in KiB; getrusage would count the process that started this one
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1])

from pipeline.pages import Page, decode_pages, discover
pages, first = 0, None
for page in decode_pages(discover([sys.argv[1]]).files[0]):
    assert isinstance(page, Page), page
    pages += 1
    first = first or high_water_mark()
peak = high_water_mark()
print(json.dumps({"pages": pages, "growth_kib": peak - first}))
"""


@pytest.mark.parametrize("kind", ["400 pages of a PDF", "500 pages of a TIFF"])
def test_memory_does_not_grow_with_the_pages(tmp_path: Path, kind: str) -> None:
    count = int(kind.split()[0])
    path = tmp_path / "a"
    if "PDF" in kind:
        simple_pdf(path, pages=count, media="0 0 288 288")
    else:
        empty = make.tiff([(make.gray_tags(800, 800), [b""])] * count)
        make.write(path, _with_one_strip(empty, bytes(640_000)))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, path], capture_output=True, text=True, check=True
    )
    measured = json.loads(done.stdout)
    assert measured["pages"] == count == count_pages(SourceFile(path, _kind(path)))
    assert measured["growth_kib"] < 12 * 1024, measured


def _kind(path: Path) -> str:
    return "pdf" if path.read_bytes().startswith(b"%PDF") else "tiff"


def _with_one_strip(data: bytes, strip: bytes) -> bytes:
    """A TIFF of empty strips whose pages all show this one."""
    empty, full = (struct.pack("<HHII", 279, 4, 1, size) for size in (0, len(strip)))
    return data.replace(empty, full) + strip
