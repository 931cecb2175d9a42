"""What does asking cost? A rerun over pages that are all cached, against a stat of the same files.

`pipeline encode` as a whole process, started as people start it, over 10,000 page files of which
every embedding is in the cache. The peer is a Python one-liner that stats the files, and the same
rerun with `--rehash` shows what the memo saves. Ratios within one run; the last line is JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np
from PIL import Image

ENCODER = Path(__file__).parents[1] / "tests" / "encoder_with_stub_tower.py"
ONE_LINER = "import os, sys; [os.stat(found.path) for found in os.scandir(sys.argv[1])]"


@click.command()
@click.option("--pages", default=10_000, show_default=True)
@click.option("--rounds", default=7, show_default=True, help="The median of each counts.")
def main(pages: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        os.environ["PIPELINE_MEMO"] = str(work / "memo.sqlite")
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # Python's own default, for both
        make_pages(work / "pages", pages)
        time.sleep(3)  # a file that changed just now is not remembered
        encode = ["encode", str(work / "pages"), "--cache", str(work / "cache"), "--json"]
        first = subprocess.run(
            [sys.executable, str(ENCODER), "0", str(work / "log"), *encode],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        assert json.loads(first.stdout)["encoded"] == pages, first.stdout
        rerun = [str(Path(sys.executable).parent / "pipeline"), *encode]
        stat = [sys.executable, "-c", ONE_LINER, str(work / "pages")]
        found = [(timed(stat), timed(rerun, pages)) for _ in range(rounds)]
        distrusting_s = timed([*rerun, "--rehash"], pages)
    stat_s, rerun_s = (statistics.median(column) for column in zip(*found, strict=True))
    print(f"one-liner that stats   {stat_s * 1e3:9.1f} ms")
    print(f"pipeline encode        {rerun_s * 1e3:9.1f} ms")
    print(f"pipeline encode --rehash {distrusting_s * 1e3:7.1f} ms")
    ratios = {"to_stat": round(rerun_s / stat_s, 2), "rehash": round(distrusting_s / stat_s, 2)}
    print(json.dumps({"benchmark": "rerun", "pages": pages, **ratios}))


def make_pages(directory: Path, count: int) -> None:
    directory.mkdir()
    for number in range(count):
        rgb = np.full((32, 32, 3), number % 251, np.uint8)
        rgb[0, :2] = divmod(number, 100)[0] % 256, number % 256, number // 251
        Image.fromarray(rgb).save(directory / f"{number}.png")


def timed(words: list[str], cached: int | None = None) -> float:
    started = time.perf_counter()
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    elapsed_s = time.perf_counter() - started
    if cached is not None:
        report = json.loads(done.stdout)
        assert (report["cached"], report["encoded"]) == (cached, 0), report
    return elapsed_s


if __name__ == "__main__":
    main()
