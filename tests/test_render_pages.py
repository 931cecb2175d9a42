"""Pages of tools/render_pages.py: what a seed promises, and what the reader relies on."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from page_texts import ALPHABET
from render_pages import MAX_CHARS, MAX_LINES, TRAINER_SPACE, command_page, draw_page, write_pages

# Text of the first pages of seed 1: a change here changes every figure measured on a seed.
SEED_1_TEXTS = ("2\nK9V1 9M/H\nVMMRO N", "6589-\nCUWKIOAEOE\n25.75 26/\nJOB", "L")


def _files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_same_seed_same_files(tmp_path: Path) -> None:
    write_pages(5, 4, tmp_path / "a", "png", hard=False)
    write_pages(5, 4, tmp_path / "b", "png", hard=False)
    assert _files(tmp_path / "a") == _files(tmp_path / "b")


def test_a_page_does_not_depend_on_the_count(tmp_path: Path) -> None:
    write_pages(5, 2, tmp_path / "few", "png", hard=True)
    write_pages(5, 3, tmp_path / "more", "png", hard=True)
    few, more = _files(tmp_path / "few"), _files(tmp_path / "more")
    assert [few[name] == more[name] for name in ("page-0000.png", "page-0001.png")] == [True, True]


def test_seed_1_is_pinned() -> None:
    assert tuple(command_page(1, index, hard=False).text for index in range(3)) == SEED_1_TEXTS


def test_other_seed_and_training_draw_other_pages() -> None:
    trained = draw_page(np.random.default_rng([TRAINER_SPACE, 1, 0]), 320, 224)
    texts = {command_page(1, 0, hard=False).text, command_page(2, 0, hard=False).text, trained.text}
    assert len(texts) == 3


def test_hard_pages_keep_text_and_size_but_lose_contrast() -> None:
    for index in range(10):
        easy, hard = command_page(3, index, hard=False), command_page(3, index, hard=True)
        assert (easy.text, easy.grey.shape) == (hard.text, hard.grey.shape)
        inked = easy.grey < np.median(easy.grey) - 40
        assert hard.grey[inked].mean() > easy.grey[inked].mean()


def test_truth_holds_every_page_with_escaped_line_breaks(tmp_path: Path) -> None:
    write_pages(1, 3, tmp_path, "png", hard=False)
    expected = "".join(
        f"page-{index:04d}.png\t{text}\n".replace("\n", "\\n", text.count("\n"))
        for index, text in enumerate(SEED_1_TEXTS)
    )
    assert (tmp_path / "truth.tsv").read_text() == expected


@pytest.mark.parametrize("extension", ["png", "jpeg", "jpg", "tiff", "webp", "bmp"])
def test_every_format_opens_as_rgb_of_the_drawn_size(tmp_path: Path, extension: str) -> None:
    write_pages(2, 1, tmp_path, extension, hard=False)
    with Image.open(tmp_path / f"page-0000.{extension}") as image:
        drawn = command_page(2, 0, hard=False).grey.shape
        assert (image.mode, image.height, image.width) == ("RGB", *drawn)


def test_texts_stay_within_the_readers_limits() -> None:
    for index in range(200):
        lines = command_page(4, index, hard=False).text.split("\n")
        assert 1 <= len(lines) <= MAX_LINES
        for line in lines:
            assert 1 <= len(line) <= MAX_CHARS
            assert set(line) <= {*ALPHABET, " "}
            assert line == " ".join(line.split())


def test_no_two_characters_share_half_a_token() -> None:
    for index in range(100):
        page = command_page(6, index, hard=False)
        slots = [(int(y // 32), int(x // 16)) for _, _, x, y in page.centres]
        assert len(slots) == len(set(slots))


@pytest.mark.parametrize("index", range(10))
def test_every_character_leaves_ink_in_its_cell(index: int) -> None:
    page = draw_page(np.random.default_rng(index), 320, 160, dense=True)
    paper = int(np.median(page.grey))
    lines = page.text.split("\n")
    half = (page.centres[1][2] - page.centres[0][2]) / 2
    for line, column, x, y in page.centres:
        cell = page.grey[int(y - half) : int(y + half), int(x - half) : int(x + half)].astype(int)
        assert (abs(cell - paper).max() > 20) == (lines[line][column] != " ")
