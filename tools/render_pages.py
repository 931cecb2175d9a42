"""Draw synthetic pages and their text.

    python tools/render_pages.py --seed 9001 --count 100 --out pages/

writes page images and `truth.tsv` (file name, tab, text with line breaks as `\\n`).
The same seed gives the same pages. The trainer draws its pages with `draw_page`, too.

A page is a canvas of one grey with up to six lines of up to twelve characters in another.
Every character sits in a square cell of 24 to 64 px, so the cell size is the type size.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent))

from page_glyphs import TYPEFACES, glyph
from page_texts import page_lines

MIN_CELL_PX = 24
MAX_CELL_PX = 64
MAX_LINES = 6
MAX_CHARS = 12
# Two lines never share a 32 px row of the reader's merged tokens.
MIN_PITCH_PX = 34
# Type sizes and positions: 8 px apart is much quicker to learn than any pixel.
GRID_PX = 8

# First number of a seed: pages of this command and pages of the trainer never meet.
COMMAND_SPACE = 0
TRAINER_SPACE = 1


@dataclass(frozen=True, slots=True)
class Page:
    """A drawn page: `grey` is (height, width) uint8, `centres` holds (line, column, x px, y px)."""

    grey: np.ndarray
    text: str
    centres: tuple[tuple[int, int, float, float], ...]


def random_canvas(rng: np.random.Generator) -> tuple[int, int]:
    """Canvas (width, height) in px: one in ten may be large."""
    widest, highest = (20, 14) if rng.random() < 0.1 else (16, 10)
    return int(rng.integers(5, widest + 1)) * 32, int(rng.integers(3, highest + 1)) * 32


def random_cell(rng: np.random.Generator, width: int, height: int) -> int:
    """Cell edge in px, log-uniform, so small that two characters fit in a line."""
    largest = min(MAX_CELL_PX, (width - 16) // 2, height - 16)
    return int(np.exp(rng.uniform(np.log(MIN_CELL_PX), np.log(largest + 1))))


def draw_page(
    rng: np.random.Generator,
    width: int,
    height: int,
    max_lines: int = MAX_LINES,
    max_chars: int = MAX_CHARS,
    dense: bool = False,
    grid: int = GRID_PX,
) -> Page:
    """Draw one clean page of `width` x `height` px.

    A dense page has as much text as fits. Type sizes and positions are multiples of `grid` px.
    """
    cell = max(MIN_CELL_PX, random_cell(rng, width, height) // grid * grid)
    pitch = -(-max(MIN_PITCH_PX, int(cell * rng.uniform(1.08, 1.45))) // grid) * grid
    lines_that_fit = 1 + max(0, height - 16 - cell) // pitch
    chars_that_fit = (width - 16) // cell
    most_lines, most_chars = min(max_lines, lines_that_fit), min(max_chars, chars_that_fit)
    line_count = most_lines if dense else int(rng.integers(1, most_lines + 1))
    lines = page_lines(rng, line_count, most_chars if dense else min(2, most_chars), most_chars)
    left = _position(rng, width - cell * max(map(len, lines)), grid)
    top = _position(rng, height - cell - pitch * (line_count - 1), grid)
    mask, centres = draw_lines(
        lines, TYPEFACES[rng.integers(len(TYPEFACES))], cell, pitch, (left, top), (width, height)
    )
    paper, ink = rng.uniform(185, 255), rng.uniform(0, 80)
    grey = paper + (ink - paper) * mask
    return Page(np.rint(grey).astype(np.uint8), "\n".join(lines), tuple(centres))


def _position(rng: np.random.Generator, room: int, grid: int) -> int:
    """A multiple of `grid` px that leaves at least 8 px on both sides, if there is room."""
    first = -(-min(8, room // 2) // grid)
    return int(rng.integers(first, max(first, (room - 8) // grid) + 1)) * grid


def draw_lines(
    lines: list[str],
    face: str,
    cell: int,
    pitch: int,
    origin: tuple[int, int],
    size: tuple[int, int],
) -> tuple[np.ndarray, list[tuple[int, int, float, float]]]:
    """Ink coverage (height, width) float32 in 0..1, and the centres of the cells."""
    (left, top), (width, height) = origin, size
    mask = np.zeros((height, width), np.float32)
    centres = []
    for row, line in enumerate(lines):
        y = top + row * pitch
        for column, character in enumerate(line):
            x = left + column * cell
            if character != " ":
                mask[y : y + cell, x : x + cell] = glyph(face, cell, character)
            centres.append((row, column, x + cell / 2, y + cell / 2))
    return mask, centres


def degrade(
    rng: np.random.Generator, grey: np.ndarray, strength: float = 1.0, angle: float = 1.5
) -> np.ndarray:
    """A worse scan of `grey` (height, width) uint8: tilted, blurred, paler, noisy."""
    height, width = grey.shape
    paper = int(np.median(grey))
    image = Image.fromarray(grey).rotate(
        rng.uniform(-angle, angle), Image.Resampling.BICUBIC, fillcolor=paper
    )
    shrink = 1 - strength * rng.uniform(0.2, 0.6)
    small = image.resize(
        (max(8, int(width * shrink)), max(8, int(height * shrink))), Image.Resampling.BILINEAR
    )
    values = np.asarray(small.resize((width, height), Image.Resampling.BILINEAR), np.float32)
    values = paper + (values - paper) * (1 - strength * rng.uniform(0.2, 0.6))
    values = values + rng.normal(0, strength * rng.uniform(4, 14), values.shape)
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


def command_page(seed: int, index: int, hard: bool) -> Page:
    """Page `index` of the command's pages for `seed`."""
    rng = np.random.default_rng([COMMAND_SPACE, seed, index])
    page = draw_page(rng, *random_canvas(rng))
    return Page(degrade(rng, page.grey), page.text, page.centres) if hard else page


def write_pages(seed: int, count: int, out: Path, extension: str, hard: bool) -> None:
    """Write `count` pages and `truth.tsv` below `out`."""
    out.mkdir(parents=True, exist_ok=True)
    truth = []
    for index in range(count):
        page = command_page(seed, index, hard)
        name = f"page-{index:04d}.{extension}"
        options = {"quality": 92} if extension in ("jpeg", "jpg", "webp") else {}
        Image.fromarray(page.grey).convert("RGB").save(out / name, **options)
        truth.append(f"{name}\t{page.text}".replace("\n", "\\n"))
    (out / "truth.tsv").write_text("\n".join(truth) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--format", default="png", help="file name extension, such as png, jpeg, tiff, webp or bmp"
    )
    parser.add_argument("--hard", action="store_true", help="tilted, blurred, pale and noisy pages")
    args = parser.parse_args()
    write_pages(args.seed, args.count, args.out, args.format, args.hard)


if __name__ == "__main__":
    main()
