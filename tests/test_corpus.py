"""The corpus of page files from bug reports: each outcome is the one that INDEX.tsv asks for.

The corpus stands beside the repository and is no part of it; without it these tests are skipped.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_pages import page_of, pages_of

from pipeline.pages import Page

CORPUS = Path(__file__).parents[2] / "shared" / "corpus"
CASES = Path(__file__).parent / "cases"
pytestmark = pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus stands elsewhere")

NARROW = ("aspect_ratio", "corrupt", "too_large")  # whichever is found first
# Files without a good page: the reasons they may be refused for
REFUSED: dict[str, tuple[str, ...]] = {
    "bmp/Bad_unusual_extend_buffer_usage.bmp": ("corrupt", "truncated"),
    "bmp/badwidth.bmp": ("too_large", "aspect_ratio"),
    "bmp/l2rgb_read.bmp": NARROW,
    "corrupt/5145e95a-02a8-11e7-8372-4787a7307ab8.jpg": ("corrupt",),
    "corrupt/9032e447e32e09aef5b7de2fab42494d.png": ("truncated",),
    "corrupt/broken.png": ("corrupt",),
    "corrupt/c3018ebe53d0046eecb58858ca869a99.jpg": ("truncated",),
    "corrupt/corrupt-header.jpg": ("truncated",),
    "corrupt/crash-2020-10-test.tif": ("corrupt", "unsupported"),
    "corrupt/crash-63b1dffefc8c075ddc606c0a2f5fdc15ece78863.tif": ("corrupt", "unsupported"),
    "corrupt/libtiff_segfault.tif": ("corrupt",),
    "corrupt/m1-9a3e0c7b687b526987e2270541002d47.png": ("corrupt",),
    "corrupt/poppler-395-0-fuzzed.pdf": ("corrupt", "truncated"),
    "corrupt/seek_too_large.tif": ("corrupt", "truncated"),
    "corrupt/value-beyond-eof.tif": ("corrupt", "truncated"),
    "corrupt/warmup.jpg": ("corrupt",),
    "gif/truncated.gif": ("truncated",),
    "jpeg/adcb34b94f4c839bdd29037419a0ee53.jpg": ("corrupt",),
    "jpeg/giant-image.jpg": ("too_large",),
    "jpeg/incomplete_image.jpg": ("truncated",),
    "jpeg/oss-fuzz-36829.jpeg": NARROW,
    "jpeg/small-img.jpg": ("aspect_ratio",),
    "jpeg/truncated.jpg": ("truncated",),
    "jpeg/truncated_jpeg.jpg": ("truncated",),
    "other/17000x17000.avif": ("too_large",),
    "other/DA-1p.heic": ("unsupported",),
    "other/balloon_trunc2.jp2": ("truncated",),
    "other/empty.heic": ("corrupt",),
    "pdf/AESkeylength256.pdf": ("encrypted",),
    "pdf/pdfplumber_empty.pdf": ("corrupt",),
    "pdf/r6-user-password.pdf": ("encrypted",),
    "pdf/simple-open-password.pdf": ("encrypted",),
    "png/65536-uint32-limit.png": ("too_large",),
    "png/broken_data_stream.png": ("corrupt",),
    "png/c-d3ffec5786387c590721e674d705f16e.png": NARROW,
    "png/syntax_num_frames_zero.png": ("corrupt",),
    "png/truncated.png": ("truncated",),
    "png/xdtn0g01.png": ("corrupt",),
    "png/xs1n0g01.png": ("corrupt",),
    "tiff/BigTIFFMotorola.tif": ("corrupt",),
    "tiff/big_g4.tif": ("aspect_ratio",),
    "tiff/gradient-1c-32b.tiff": ("aspect_ratio",),
    "tiff/hopper_webp.tif": ("unsupported",),
    "tiff/m10-42c19f8e79e582bef107f372f18a074b.tif": NARROW,
}
SKIPPED = {"other/1x1_exif_xmp.jxl"}
PAGES = {  # of files with more than one
    "pdf/boxes.pdf": 8,
    "pdf/prefilled_f1040.pdf": 2,
    "pdf/repeating_references_on_pg9_pg10.pdf": 10,
    "tiff/G31D_MULTI.TIF": 2,
    "tiff/f4bcc246f3471102a2dea2ee9153b372.tif": 4,
    "tiff/fivepages-scan-causingerrors.tif": 5,
    "tiff/test_ifd_loop_to_first.tif": 2,
}
DAMAGED_PAGE = {"tiff/d664a73588796b59191ad8628065f04a.tif": [None, None, "truncated"]}


@dataclass(frozen=True, slots=True)
class Listing:
    """What `pipeline pages --json` says of the corpus: file → its pages."""

    model: str
    pages: dict[str, list[dict[str, Any]]]
    skipped: int
    peak_bytes: int


def index() -> dict[str, dict[str, str]]:
    """Path → row of INDEX.tsv."""
    with open(CORPUS / "INDEX.tsv", encoding="utf-8", newline="") as stream:
        rows = csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)
        return {row["path"]: row for row in rows}


# The command, and the peak memory in KiB of it and of any process that it starts as the last words
# on stderr; getrusage would count the process that started it, too.
COMMAND_AND_PEAK = """
import atexit, os, subprocess, sys, threading, time
from pipeline.cli import main

peaks = {}

def look():
    mine = str(os.getpid())
    listed = subprocess.run(["ps", "--ppid", mine, "-o", "pid="], capture_output=True, text=True)
    for pid in [mine, *listed.stdout.split()]:
        try:
            with open(f"/proc/{pid}/status") as status:
                marks = [line for line in status if line.startswith("VmHWM")]
        except OSError:
            continue
        if marks:
            peaks[pid] = int(marks[0].split()[1])

def watch():
    while True:
        look()
        time.sleep(0.1)

threading.Thread(target=watch, daemon=True).start()
atexit.register(lambda: print(len(peaks), max(peaks.values()), file=sys.stderr))
main()
"""


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def listing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Listing:
    out = tmp_path_factory.mktemp("corpus") / "pages.json"
    words = ["pages", CORPUS, "--json", "--model", CASES / request.param]
    with open(out, "wb") as stdout:
        command = [sys.executable, "-c", COMMAND_AND_PEAK, *map(str, words)]
        child = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE)
    assert child.returncode == 3
    record = json.loads(out.read_text())
    pages: dict[str, list[dict[str, Any]]] = {}
    for page in record["pages"]:
        pages.setdefault(os.path.relpath(page["file"], CORPUS), []).append(page)
    processes, peak_kib = map(int, child.stderr.split()[-2:])
    assert processes >= 3  # two of them decode; `ps` may have been seen, too
    return Listing(request.param, pages, record["skipped"], peak_kib * 1024)


def test_every_file_is_listed_or_counted(listing: Listing) -> None:
    expected = {name for name in index() if name not in SKIPPED}
    assert set(listing.pages) == expected
    others = sum(path.is_file() for path in CORPUS.rglob("[!.]*")) - len(listing.pages)
    assert listing.skipped == others


def test_every_outcome_is_the_right_one(listing: Listing) -> None:
    wrong = {}
    for name, pages in listing.pages.items():
        reasons = [page["reason"] for page in pages]
        if name in REFUSED:
            right = all(reason in REFUSED[name] for reason in reasons)
        else:
            right = reasons == DAMAGED_PAGE.get(name, [None] * PAGES.get(name, 1))
        if not right:
            wrong[name] = reasons
    assert wrong == {}


def test_the_table_above_is_what_the_index_asks_for() -> None:
    for name, row in index().items():
        outcome = row["right_outcome"]
        if outcome.startswith("accept") and "clean error" not in outcome:
            assert name not in REFUSED or "documented" in outcome, name
        if outcome.startswith(("reject", "clean")) and "accept" not in outcome:
            assert name in REFUSED, name


def test_sizes_at_the_model_are_those_of_the_index(listing: Listing) -> None:
    """INDEX.tsv gives them for images, by the rule of the processors."""
    rule = {"qwen2_5_vl": "f28", "qwen3_vl": "f32"}[listing.model]
    checked = 0
    for name, row in index().items():
        found = re.search(rf"{rule}\[\d+,\d+\]=(\d+)x(\d+)", row["decoded"])
        page = listing.pages.get(name, [{"reason": "skipped"}])[0]
        if page["reason"] is None and found is not None:
            seen = (page["model_width_px"], page["model_height_px"])
            assert seen == (int(found[1]), int(found[2])), name
            checked += 1
    assert checked >= 50


def test_refusals_name_the_number_that_is_too_big(listing: Listing) -> None:
    for pages in listing.pages.values():
        for page in pages:
            if page["reason"] in ("too_large", "aspect_ratio"):
                assert re.search(r"\d+ x \d+ px .*is above [\d,]+", page["detail"]), page


def test_memory_stays_below_one_gib(listing: Listing) -> None:
    assert listing.peak_bytes < 1 << 30


# ---------------------------------------------------------------- pixels


@pytest.mark.parametrize("number", [2, 3, 5, 6, 8])
def test_photos_of_each_orientation_show_the_same_scene(number: int) -> None:
    upright = page_of(CORPUS / "jpeg" / "Landscape_1.jpg").astype(int)
    turned = page_of(CORPUS / "jpeg" / f"Landscape_{number}.jpg")
    assert turned.shape == upright.shape
    assert np.abs(turned - upright).mean() < 20


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("jpeg/Portrait_6.jpg", (600, 450)),
        ("tiff/g4_orientation_6.tif", (88, 590)),
        ("other/avif-orientation-6.avif", (4032, 3024)),
        ("jpeg/Landscape_0.jpg", (1200, 1800)),
    ],
)
def test_pages_are_turned_once(name: str, shape: tuple[int, int]) -> None:
    assert page_of(CORPUS / name).shape[:2] == shape


def test_faxes_of_each_orientation_are_the_same_page() -> None:
    pages = [page_of(CORPUS / "tiff" / f"g4_orientation_{number}.tif") for number in (3, 4, 6, 8)]
    for page in pages[1:]:
        assert np.abs(page.astype(int) - pages[0]).mean() < 1


@pytest.mark.parametrize(
    ("name", "top_share"),
    [
        ("png/L_16__128x128.png", 0.02),
        ("png/basi0g16.png", 0.02),
        ("tiff/16bit.MM.deflate.tif", 0.02),
        ("other/16bit.cropped.jp2", 0.02),
    ],
)
def test_scans_of_16_bits_are_not_white(name: str, top_share: float) -> None:
    assert (page_of(CORPUS / name) == 255).all(axis=2).mean() < top_share


def test_no_transparent_ground_is_black() -> None:
    assert page_of(CORPUS / "png" / "full-transparent.png").min() == 255
    assert page_of(CORPUS / "png" / "tbwn3p08.png")[0, 0].tolist() == [255] * 3


def test_five_frames_have_five_sizes() -> None:
    pages = pages_of(CORPUS / "tiff" / "fivepages-scan-causingerrors.tif")
    sizes = {page.rgb.shape for page in pages if isinstance(page, Page)}
    assert len(pages) == len(sizes) == 5


@pytest.mark.parametrize("name", ["prefilled_f1040.pdf", "libreoffice-form.pdf", "acroform.pdf"])
def test_forms_are_drawn_with_their_fields(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = pages_of(CORPUS / "pdf" / name, dpi=72)[0]
    monkeypatch.setattr("pypdfium2.PdfDocument.init_forms", lambda self: None)
    bare = pages_of(CORPUS / "pdf" / name, dpi=72)[0]
    assert isinstance(drawn, Page) and isinstance(bare, Page)
    assert (drawn.rgb != bare.rgb).any()


def test_files_named_alike_are_told_apart() -> None:
    upright = page_of(CORPUS / "png" / "devatest.png")
    assert page_of(CORPUS / "png" / "devatest-rotated-270.png").shape != upright.shape
