"""Memory of encoding: a page is attended alone, so many pages need no more than one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import makers_pages as make
import numpy as np
import pytest
from checkpoints import make_qwen3_vl
from PIL import Image
from test_decoders import children
from test_pages import simple_pdf

from pipeline.checkpoint import resolve_model
from pipeline.encode import Done, Outcome, encode_pages, target_for
from pipeline.pages import Discovery

# A4 at 85 dpi in the bundled model's budget: 20 x 28 tokens, 2,240 patches. Attended together,
# eight pages would hold 64 times one page's scores.
SIZE_PX = (992, 704)
SCRIPT = """
import json, sys

def high_water_mark():  # in KiB; getrusage would count the process that started this one
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1])

from pathlib import Path
from pipeline.checkpoint import resolve_model
from pipeline.encode import encode_pages, target_for

report = encode_pages([sys.argv[1]], target_for(resolve_model(), Path(sys.argv[2])))
peak = high_water_mark()
print(json.dumps({"encoded": report.encoded, "peak_kib": peak}))
"""


def peak_kib(work: Path, pages: int) -> int:
    directory = work / f"{pages}-pages"
    directory.mkdir()
    for number in range(pages):
        noise = np.random.default_rng(number).integers(0, 256, (*SIZE_PX, 3), dtype=np.uint8)
        Image.fromarray(noise).save(directory / f"{number}.png")
    words = [sys.executable, "-c", SCRIPT, directory, work / f"cache-{pages}"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    record = json.loads(done.stdout)
    assert record["encoded"] == pages
    return int(record["peak_kib"])


def test_eight_pages_need_no_more_memory_than_one(tmp_path: Path) -> None:
    one, eight = (peak_kib(tmp_path, pages) for pages in (1, 8))
    # what may grow is the allocator's slack, not the scores of pages attended together
    assert eight < one * 1.1


# ---------------------------------------------------------------- documents of many pages

# Peak memory in KiB of the process and of its decoders, looked at before they end.
MANY = """
import json, os, sys
from pathlib import Path
from pipeline.checkpoint import resolve_model
from pipeline.encode import encode_pages, target_for

def peak(pid):
    with open(f"/proc/{pid}/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1])

def is_decoder(pid):
    with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline") as words:
        parent = int(stat.read().rpartition(")")[2].split()[1])
        return parent == os.getpid() and "pages.worker" in words.read()

peaks = []
def watch(outcomes, found):
    for count, outcome in enumerate(outcomes, start=1):
        for pid in filter(str.isdecimal, os.listdir("/proc") if count % 10 == 0 else ()):
            try:
                if is_decoder(pid):
                    peaks.append(peak(pid))
            except (OSError, StopIteration):  # it has ended meanwhile
                continue
        yield outcome

target = target_for(resolve_model(sys.argv[3]), Path(sys.argv[2]))
report = encode_pages([sys.argv[1]], target, watch=watch)
found = {"pages": report.pages, "failed": report.failed}
print(json.dumps(found | {"encoder_kib": peak("self"), "decoder_kib": max(peaks)}))
"""


def document(path: Path, kind: str, pages: int) -> Path:
    """Pages of 96 x 96 points or pixels, each of its own gray."""
    if kind == "pdf":
        return simple_pdf(path, pages=pages, media="0 0 96 96")
    sheets = [(make.gray_tags(96, 96), [bytes([n % 256]) * 96 * 96]) for n in range(pages)]
    return make.write(path, make.tiff(sheets))


@pytest.mark.parametrize(("kind", "many"), [("pdf", 400), ("tiff", 500)])
def test_memory_does_not_grow_with_the_pages_of_a_document(
    tmp_path: Path, kind: str, many: int
) -> None:
    checkpoint = make_qwen3_vl(tmp_path / "model")
    found = {}
    for pages in (40, many):
        path = document(tmp_path / f"{pages}", kind, pages)
        words = [sys.executable, "-c", MANY, path, tmp_path / f"cache-{pages}", checkpoint]
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
        found[pages] = json.loads(done.stdout)
        assert (found[pages]["pages"], found[pages]["failed"]) == (pages, 0)
    sizes = [(tmp_path / f"{pages}").stat().st_size for pages in (40, many)]
    read_kib = (sizes[1] - sizes[0]) >> 10  # a decoder holds a small file whole, of any pages
    assert found[many]["encoder_kib"] < found[40]["encoder_kib"] * 1.1, found
    assert found[many]["decoder_kib"] < found[40]["decoder_kib"] * 1.1 + read_kib, found


@pytest.mark.parametrize(("kind", "many"), [("pdf", 400), ("tiff", 500)])
def test_encoding_begins_before_the_last_page_is_decoded(
    tmp_path: Path, kind: str, many: int
) -> None:
    path = document(tmp_path / "a", kind, many)
    target = target_for(resolve_model(str(make_qwen3_vl(tmp_path / "model"))), tmp_path / "cache")

    def watch(outcomes: Iterator[Outcome], found: Discovery) -> Iterator[Outcome]:
        first = next(outcomes)
        assert isinstance(first, Done) and first.stored_bytes
        assert len(children()) == 1  # it waits: no more than some pages are decoded ahead
        yield first

    report = encode_pages([path], target, watch=watch)
    assert (report.pages, report.encoded) == (1, 1)
    assert not children()
