"""Do encoders that are given the same pages split them? Four at once against one.

A stub stands in for the vision tower: 50 ms of processor time a page, so that what is measured is
the sharing, start of the processes included. Ratios within one run; the last line is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np
from PIL import Image

ENCODER = Path(__file__).parents[1] / "tests" / "encoder_with_stub_tower.py"


@click.command()
@click.option("--pages", default=400, show_default=True)
@click.option("--tower-s", default=0.05, show_default=True, help="Processor time of a page.")
@click.option("--rounds", default=3, show_default=True, help="The best of each counts.")
def main(pages: int, tower_s: float, rounds: int) -> None:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled modules are kept, as is the default
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        make_pages(work / "pages", pages)
        encode(work, "warm", 1, tower_s, pages=work / "pages" / "0.png")
        found = [
            (encode(work, f"one-{n}", 1, tower_s), encode(work, f"four-{n}", 4, tower_s))
            for n in range(rounds)
        ]
    one_s = min(one for (one, _), _ in found)
    four_s = min(four for _, (four, _) in found)
    twice = max(count - pages for _, (_, count) in found)
    print(f"one encoder   {one_s:8.2f} s {pages / one_s:8.1f} pages/s")
    print(f"four encoders {four_s:8.2f} s {pages / four_s:8.1f} pages/s, {twice} pages twice")
    ratios = {"wall": round(four_s / one_s, 3), "duplicates": round(twice / pages, 4)}
    print(json.dumps({"benchmark": "four_encoders", "pages": pages, **ratios}))


def make_pages(directory: Path, count: int) -> None:
    directory.mkdir()
    for number in range(count):
        noise = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).save(directory / f"{number}.png")


def encode(
    work: Path, name: str, encoders: int, tower_s: float, pages: Path | None = None
) -> tuple[float, int]:
    """(wall time, pages computed) of so many encoders at once over the same pages."""
    log = work / f"{name}.log"
    words = [sys.executable, str(ENCODER), str(tower_s), str(log), "encode"]
    words += [str(pages or work / "pages"), "--cache", str(work / name)]
    words += ["--workers", "1", "--threads", "1", "--quiet"]
    started = time.monotonic()
    running = [subprocess.Popen(words) for _ in range(encoders)]
    for process in running:
        assert process.wait() == 0
    elapsed_s = time.monotonic() - started
    return elapsed_s, len(log.read_text().split())


if __name__ == "__main__":
    main()
