"""Does decoding keep up? JPEG pages through the decoding processes and the resize to model size.

The peer is Pillow's own decode of the same files in one process, the limit the same in as many
processes as there are cores. The last two rows let a stand-in for the tower take 50 ms of each
page: its waiting is what decoding cost it. Ratios within one run; the last line is JSON.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from pipeline.checkpoint import resolve_model
from pipeline.encode.beside import beside
from pipeline.encode.records import DecodeOptions
from pipeline.families import family_of
from pipeline.pages import Page, SourceFile
from pipeline.pages.decoders import Decoders
from pipeline.pages.requests import DecodeRequest

CASES = Path(__file__).parents[1] / "tests" / "cases"
A4_200_DPI_PX = (1654, 2339)
TOWER_S = 0.05


@click.command()
@click.option("--pages", default=60, show_default=True)
@click.option("--rounds", default=3, show_default=True, help="The best of each counts.")
def main(pages: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        files = [scan(Path(directory) / f"{number}.jpg", number) for number in range(pages)]
        ours(files[:2], 0.0)  # imports torch
        pillow_s = min(timed(lambda: [pillow(file) for file in files]) for _ in range(rounds))
        with ProcessPoolExecutor(cores()) as pool:
            list(pool.map(pillow, files[:4]))
            all_s = min(timed(lambda: list(pool.map(pillow, files))) for _ in range(rounds))
        ours_s = min(timed(lambda: ours(files, 0.0)) for _ in range(rounds))
        fed_s = min(timed(lambda: ours(files, TOWER_S)) for _ in range(rounds))
    rows = {
        "Pillow, one process": pillow_s,
        f"Pillow, {cores()} processes": all_s,
        "ours, decode and resize": ours_s,
        "ours, and 50 ms per page": fed_s,
    }
    for name, seconds in rows.items():
        print(f"{name:28} {pages / seconds:8.1f} pages/s {seconds:8.2f} s")
    ratios = {
        "to_pillow": round(pillow_s / ours_s, 3),
        "to_pillow_on_all_cores": round(all_s / ours_s, 3),
        "tower_busy": round(pages * TOWER_S / fed_s, 3),
    }
    print(json.dumps({"cores": cores(), "pages": pages} | ratios))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def timed(work: Callable[[], object]) -> float:
    """Wall seconds."""
    started = time.monotonic()
    work()
    return time.monotonic() - started


def scan(path: Path, seed: int) -> Path:
    """An A4 page at 200 dpi with text-like marks and a scanner's noise, as a JPEG of quality 85."""
    draw = np.random.default_rng(seed)
    page = Image.new("L", A4_200_DPI_PX, 245)
    pen = ImageDraw.Draw(page)
    for y in range(150, A4_200_DPI_PX[1] - 150, 34):
        x = 150
        while x < A4_200_DPI_PX[0] - 200:
            width = int(draw.integers(8, 20))
            pen.rectangle((x, y, x + width - 4, y + int(draw.integers(8, 20))), fill=30)
            x += width + int(draw.integers(0, 14))
    soft = np.asarray(page.filter(ImageFilter.GaussianBlur(0.8)), np.int16)
    noisy = soft + draw.integers(-6, 7, soft.shape, dtype=np.int16)
    rgb = np.repeat(np.clip(noisy, 0, 255).astype(np.uint8)[:, :, None], 3, axis=2)
    Image.fromarray(rgb).save(path, quality=85)
    return path


def pillow(path: Path) -> int:
    """Decode as anybody would."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).shape[0]


def ours(files: list[Path], tower_s: float) -> None:
    """Decode apart, resize beside the tower, and hold each page as long as a tower would work."""
    seen = 0
    for _ in beside(resized(files)):
        time.sleep(tower_s)
        seen += 1
    assert seen == len(files)


def resized(files: list[Path]) -> Generator[NDArray[np.uint8], None, None]:
    """Pages at the size of a model of the Qwen3-VL kind with a budget of 1 megapixel."""
    model = resolve_model(str(CASES / "qwen3_vl"))
    family = family_of(model)
    spec = family.encode_spec(model, max_pixels=1_048_576)
    options = DecodeOptions()
    render = options.render(spec.geometry)
    asked = ((None, DecodeRequest(SourceFile(file, "jpeg"), render)) for file in files)
    with Decoders(options.processes, options.limits) as decoders:
        for _, pages in decoders.ahead(asked):
            for page in pages:
                assert isinstance(page, Page), page
                height_px, width_px, _ = page.rgb.shape
                placement = spec.geometry.place(height_px, width_px)
                yield family.resize(page.rgb, placement, spec)


if __name__ == "__main__":
    main()
