"""Decoding in processes of their own: right pages, in order; a crash, a hang or a hunger costs one
document.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import makers_pages as make
import numpy as np
import pytest
from PIL import Image
from test_pages import scene, simple_pdf

from pipeline.errors import Failure, Reason
from pipeline.keys import RenderSpec, pixel_digest
from pipeline.pages import (
    DEFAULT_DPI,
    DEFAULT_RENDER,
    RULES,
    Page,
    PageRanges,
    SourceFile,
    Wanted,
    decode_pages,
    discover,
)
from pipeline.pages.decoders import Decoders
from pipeline.pages.process import PAGES_AHEAD
from pipeline.pages.records import behind
from pipeline.pages.requests import DecodeLimits, DecodeRequest

QUICK = DecodeLimits(page_s=1.0)


@pytest.fixture
def damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that decoding processes load at their start: decoders that die by file name."""
    code = """
import os, signal, sys, time
if sys.argv[1:2] and sys.argv[0].endswith("worker.py") or "pipeline.pages.worker" in sys.orig_argv:
    from pipeline import pages
    from pipeline.pages import images
    original = images._decoded
    def decoded(image, file, stream, allow_truncated):
        name, page = file.path.name, image.tell() + 1
        if name.startswith("crash") and (page == 2 or "all" in name):
            os.kill(os.getpid(), signal.SIGSEGV)
        if name.startswith("hang") and page == 2:
            time.sleep(60)
        if name.startswith("exit") and page == 2:
            os._exit(7)
        if name.startswith("lie") and page == 2:
            image._size = (1 << 20, 1 << 20)
        return original(image, file, stream, allow_truncated)
    images._decoded = decoded
"""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(site))
    yield tmp_path


def tiff(path: Path, pages: int) -> SourceFile:
    first, *rest = [scene(60 + number, 40) for number in range(pages)]
    first.save(path, "TIFF", save_all=True, append_images=rest)
    return SourceFile(path, "tiff")


def decoded(
    file: SourceFile, only: Wanted | None = None, limits: DecodeLimits = QUICK
) -> list[Page | Failure]:
    with Decoders(1, limits) as decoders:
        asked = [(None, DecodeRequest(file, DEFAULT_RENDER, only))]
        return [page for _, pages in decoders.ahead(asked) for page in pages]


def told(pages: list[Page | Failure]) -> list[tuple[int | None, str]]:
    return [(p.page, p.reason.value if isinstance(p, Failure) else "page") for p in pages]


def children() -> set[int]:
    found = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "pid=,args="], capture_output=True, text=True
    )
    return {int(line.split()[0]) for line in found.stdout.splitlines() if "pages.worker" in line}


# ---------------------------------------------------------------- pages


def test_pages_are_those_of_this_process_in_the_order_of_the_files(tmp_path: Path) -> None:
    tiff(tmp_path / "a.tif", 5)
    for number in range(6):
        scene(50 + number, 70).save(tmp_path / f"b{number}.png")
    simple_pdf(tmp_path / "c.pdf", pages=3)
    (tmp_path / "d.png").write_bytes((tmp_path / "b0.png").read_bytes()[:100])
    files = discover([tmp_path]).files
    expected = [page for file in files for page in decode_pages(file)]
    for processes in (1, 3):
        with Decoders(processes) as decoders:
            asked = [(file, DecodeRequest(file, DEFAULT_RENDER)) for file in files]
            found = [(file, list(pages)) for file, pages in decoders.ahead(asked)]
            assert [file for file, _ in found] == list(files)
            assert len(children()) == processes
        assert not children()
        pages = [page for _, pages in found for page in pages]
        assert len(pages) == len(expected) == 15
        for page, other in zip(pages, expected, strict=True):
            if isinstance(page, Page) and isinstance(other, Page):
                assert (page.file, page.page) == (other.file, other.page)
                assert pixel_digest(page.rgb) == pixel_digest(other.rgb)
            else:
                assert page == other


def test_items_without_a_request_start_no_process() -> None:
    with Decoders(2) as decoders:
        found = [
            (item, list(pages)) for item, pages in decoders.ahead((n, None) for n in range(50))
        ]
        assert found == [(n, []) for n in range(50)]
        assert not children()


def test_the_next_file_is_decoded_while_this_one_is_used(tmp_path: Path) -> None:
    files = [tiff(tmp_path / f"{number}.tif", 5) for number in range(4)]
    begun: list[Path] = []

    def asked() -> Iterator[tuple[SourceFile, DecodeRequest]]:
        for file in files:
            begun.append(file.path)
            yield file, DecodeRequest(file, DEFAULT_RENDER)

    with Decoders(2) as decoders:
        ahead = decoders.ahead(asked())
        _, pages = next(ahead)
        next(pages)
        assert begun == [file.path for file in files[:2]]  # and no more than there are processes


def test_a_process_is_at_most_some_pages_ahead(tmp_path: Path) -> None:
    file = tiff(tmp_path / "a.tif", 40)
    with Decoders(1) as decoders:
        asked = [(None, DecodeRequest(file, DEFAULT_RENDER))]
        for _, pages in decoders.ahead(asked):
            next(pages)
            (pid,) = children()
            time.sleep(0.5)
            held = sum(
                os.stat(f"/proc/{pid}/fd/{name}").st_size
                for name in os.listdir(f"/proc/{pid}/fd")
                if os.readlink(f"/proc/{pid}/fd/{name}").startswith("/memfd:page")
            )
            assert 0 < held <= PAGES_AHEAD * 100 * 40 * 3
            assert len(list(pages)) == 39


def test_leaving_early_ends_the_processes(tmp_path: Path) -> None:
    files = [tiff(tmp_path / f"{number}.tif", 9) for number in range(3)]
    with Decoders(2) as decoders:
        for _, pages in decoders.ahead((None, DecodeRequest(f, DEFAULT_RENDER)) for f in files):
            next(pages)
            break
    assert not children()


@pytest.mark.parametrize(
    ("only", "pages"),
    [
        (frozenset({2, 4}), [2, 4]),
        (PageRanges(((2, 3), (5, None))), [2, 3, 5, 6]),
        (PageRanges(((7, None),)), []),
    ],
)
def test_only_wanted_pages_come(tmp_path: Path, only: Wanted, pages: list[int]) -> None:
    assert told(decoded(tiff(tmp_path / "a.tif", 6), only)) == [(n, "page") for n in pages]


def test_pages_behind_a_number() -> None:
    assert behind(frozenset({1, 3, 5}), 3) == frozenset({5})
    assert behind(None, 3) == PageRanges(((4, None),))
    left = behind(PageRanges(((1, 4), (9, None))), 3)
    assert [n for n in range(1, 12) if n in left] == [4, 9, 10, 11]


def test_pages_are_counted_apart(tmp_path: Path) -> None:
    scene().save(tmp_path / "a.png")
    tiff(tmp_path / "b.tif", 5)
    simple_pdf(tmp_path / "c.pdf", pages=3)
    (tmp_path / "d.pdf").write_bytes(b"%PDF-1.4 and no more")
    with Decoders(1) as decoders:
        assert decoders.count(discover([tmp_path]).files) == 1 + 5 + 3 + 1
        asked = DecodeRequest(
            SourceFile(tmp_path / "b.tif", "tiff"), DEFAULT_RENDER, frozenset({4})
        )
        assert told([decoders.page(asked)]) == [(4, "page")]


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("name", "reason", "detail"),
    [
        ("crash.tif", "crashed", "the decoder was ended by SIGSEGV"),
        ("exit.tif", "crashed", "the decoder ended with status 7"),
        ("hang.tif", "timed_out", "decoding a page took more than 1 s"),
    ],
)
def test_a_page_that_kills_its_decoder_is_a_failure_and_the_next_ones_follow(
    damage: Path, name: str, reason: str, detail: str
) -> None:
    pages = decoded(tiff(damage / name, 4))
    assert told(pages) == [(1, "page"), (2, reason), (3, "page"), (4, "page")]
    assert isinstance(pages[1], Failure)
    assert pages[1].detail == detail and pages[1].retryable
    assert told(decoded(SourceFile(damage / name, "tiff"), frozenset({2, 4}))) == [
        (2, reason),
        (4, "page"),
    ]


def test_the_next_document_is_not_touched(damage: Path) -> None:
    files = [tiff(damage / name, 3) for name in ("crash_all.tif", "good.tif", "hang.tif")]
    for processes in (1, 2):
        with Decoders(processes, QUICK) as decoders:
            asked = [(file, DecodeRequest(file, DEFAULT_RENDER)) for file in files]
            found = [told(list(pages)) for _, pages in decoders.ahead(asked)]
        assert found == [
            [(None, "crashed")],
            [(1, "page"), (2, "page"), (3, "page")],
            [(1, "page"), (2, "timed_out"), (3, "page")],
        ]


def test_a_document_that_keeps_killing_decoders_is_given_up(damage: Path) -> None:
    file = tiff(damage / "crash_all.tif", 9)
    pages = decoded(file, frozenset({1, 3, 4, 6, 7}))
    assert told(pages) == [(number, "crashed") for number in (1, 3, 4, 6, 7)]
    assert "given up" in str(pages[-1])


def test_a_page_that_takes_too_much_memory_is_too_large(tmp_path: Path) -> None:
    Image.new("RGB", (9000, 9000)).save(tmp_path / "large.png", compress_level=1)
    scene().save(tmp_path / "small.png")
    limits = DecodeLimits(memory_bytes=400 << 20)
    (large,) = decoded(SourceFile(tmp_path / "large.png", "png"), limits=limits)
    assert isinstance(large, Failure) and large.reason is Reason.TOO_LARGE
    assert large.detail == "decoding it takes more than 400 MiB"
    (small,) = decoded(SourceFile(tmp_path / "small.png", "png"), limits=limits)
    assert isinstance(small, Page)


def test_the_largest_pages_fit_into_the_default_limit(tmp_path: Path) -> None:
    Image.new("RGB", (10_000, 10_000), "white").save(tmp_path / "a.jpg")
    (page,) = decoded(SourceFile(tmp_path / "a.jpg", "jpeg"), limits=DecodeLimits())
    assert isinstance(page, Page) and page.rgb.shape == (10_000, 10_000, 3)


def test_decoders_die_with_a_killed_owner(tmp_path: Path) -> None:
    tiff(tmp_path / "a.tif", 9)
    code = (
        "import sys, time; from pathlib import Path\n"
        "from pipeline.pages import DEFAULT_RENDER, SourceFile\n"
        "from pipeline.pages.decoders import Decoders\n"
        "from pipeline.pages.requests import DecodeRequest\n"
        "decoders = Decoders(1)\n"
        "asked = [(0, DecodeRequest(SourceFile(Path(sys.argv[1]), 'tiff'), DEFAULT_RENDER))]\n"
        "for _, pages in decoders.ahead(asked):\n"
        "    next(pages); print(decoders._all[0]._child.pid, flush=True); time.sleep(60)\n"
    )
    words = [sys.executable, "-c", code, tmp_path / "a.tif"]
    owner = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    os.kill(pid, 0)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        state = Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0]
        if state == "Z":
            break
        time.sleep(0.05)
    assert time.monotonic() < until


def test_what_decoders_written_in_c_print_does_not_reach_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = make.tiff([(make.gray_tags(8, 8), [bytes(64)])])
    (tmp_path / "a.tif").write_bytes(data[:-30])
    decoded(SourceFile(tmp_path / "a.tif", "tiff"))
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------- cut files


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_what_is_left_of_a_cut_page_comes_where_it_is_allowed(tmp_path: Path, kind: str) -> None:
    whole = scene(640, 480)
    whole.save(tmp_path / "whole", kind.upper())
    data = (tmp_path / "whole").read_bytes()
    (tmp_path / "cut").write_bytes(data[: len(data) * 2 // 3])
    file = SourceFile(tmp_path / "cut", kind)
    (refused,) = decode_pages(file)
    assert isinstance(refused, Failure) and refused.reason is Reason.TRUNCATED
    (page,) = decode_pages(file, RenderSpec(RULES, DEFAULT_DPI, allow_truncated=True))
    assert isinstance(page, Page) and page.partial
    difference = np.abs(page.rgb[:200].astype(int) - np.asarray(whole)[:200]).mean()
    assert difference < 4
    from PIL import ImageFile

    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    (page,) = decode_pages(
        SourceFile(tmp_path / "whole", kind), RenderSpec(RULES, DEFAULT_DPI, allow_truncated=True)
    )
    assert isinstance(page, Page) and not page.partial
