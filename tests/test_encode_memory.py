"""Memory of encoding: a page is attended alone, so many pages need no more than one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

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
