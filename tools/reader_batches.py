"""Training batches: pages of one size, their prompts, answers and slot labels.

A merged visual token covers 32 x 32 px. Cells are at least 24 px wide, so each half of a token
holds the centre of at most one character: a slot. Slots are labelled for the auxiliary loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from page_texts import ALPHABET
from PIL import Image
from reader_model import TOKEN_IDS
from render_pages import GRID_PX, MAX_CHARS, MAX_LINES, TRAINER_SPACE, Page, degrade, draw_page

TOKEN_PX = 32
SLOTS = 2
IGNORED = -100
# Classes of a slot: no character, start or end of the text, line break, space, the alphabet.
CLASSES = {character: number for number, character in enumerate(("", "^", "\n", " ", *ALPHABET))}

PROMPTS = (
    "Read the page.",
    "Read the pages.",
    "Read this page.",
    "Read the text.",
    "Transcribe the page.",
    "What does the page say?",
    "OCR:",
)
SYSTEMS = (
    "You read pages.",
    "You are a helpful assistant.",
    "Answer with the text of the page only.",
)
FILLER = """
    you are a careful reader of scanned pages please return all text line by line and keep the
    order do not add anything else say what is written in this document with no comment the
    answer is plain text of an archive
""".split()  # noqa: SIM905 - a list of strings would be a page long


@dataclass(frozen=True, slots=True)
class Stage:
    """Limits of the pages of a batch: canvas edges in units of 32 px, lines, characters, images."""

    max_width: int
    max_height: int
    max_lines: int
    max_chars: int
    max_images: int


STAGES = (
    Stage(10, 3, 1, 8, 1),
    Stage(12, 5, 2, 10, 1),
    Stage(14, 8, 4, 12, 1),
    Stage(16, 10, MAX_LINES, MAX_CHARS, 3),
)
LARGE_STAGE = Stage(20, 14, MAX_LINES, MAX_CHARS, 1)


@dataclass(frozen=True, slots=True)
class Batch:
    """One training step's data for B requests of k images.

    pixels: per image (B, height, width) float32 in -1..1
    ids: (B, L) int64, right-padded; targets: (B, L) next-token ids, IGNORED outside the answer
    places: (answer tokens of the batch, 3) int64: page, line and column of each target
    slots: per image (B, T, SLOTS, 5) int64: own, previous, next character, line, column
    """

    pixels: list[torch.Tensor]
    ids: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor
    slots: list[torch.Tensor]


def training_batch(seed: int, step: int, reach: float) -> Batch:
    """The batch of a step; `reach` is 0 to 1 over the curriculum, below 0 only the tower learns."""
    rng = np.random.default_rng([TRAINER_SPACE, seed, step])
    if reach < 0:
        return _dense_batch(rng)
    stage = _draw_stage(rng, reach)
    count = int(
        rng.choice(
            np.arange(1, stage.max_images + 1),
            p=[0.6, 0.2, 0.2] if stage.max_images == 3 else None,
        )
    )
    shrink = (1.0, 0.9, 0.8)[count - 1]
    canvases = [_draw_canvas(rng, stage, shrink) for _ in range(count)]
    tokens = sum(width * height for width, height in canvases)
    size = int(np.clip(1400 // tokens, 5, 32))
    max_lines = max(1, round(stage.max_lines * shrink))
    pages = [
        [_draw(rng, *canvas, max_lines, stage.max_chars) for canvas in canvases]
        for _ in range(size)
    ]
    return _batch(_requests(rng, _texts(pages), canvases), pages)


def _texts(pages: list[list[Page]]) -> list[list[str]]:
    return [[page.text for page in request] for request in pages]


def _dense_batch(rng: np.random.Generator) -> Batch:
    """Small pages full of text: many slots for a tower that has yet to learn its letters."""
    columns, rows = ((8, 4), (6, 5), (10, 3))[rng.integers(3)]
    size = (columns * TOKEN_PX, rows * TOKEN_PX)
    grids = rng.choice([GRID_PX, 1], 32, p=[0.75, 0.25])
    pages = [[draw_page(rng, *size, dense=True, grid=int(grid))] for grid in grids]
    return _batch(_requests(rng, _texts(pages), [(columns, rows)]), pages)


def _batch(rows: list[tuple[list[int], int]], pages: list[list[Page]]) -> Batch:
    """Tensors of B requests: their token rows, and their k pages each."""
    ids, targets = _pad(rows)
    by_image = list(zip(*pages, strict=True))
    return Batch(
        [
            torch.from_numpy(np.stack([page.grey for page in image])).float() / 127.5 - 1
            for image in by_image
        ],
        ids,
        targets,
        torch.tensor([place for row, answer in rows for place in answer_places(row[answer:])]),
        [torch.from_numpy(np.stack([slot_labels(page) for page in image])) for image in by_image],
    )


def _draw_stage(rng: np.random.Generator, reach: float) -> Stage:
    """Mostly the hardest stage reached, one time in five an easier one."""
    hardest = min(len(STAGES) - 1, int(reach * len(STAGES)))
    if hardest == len(STAGES) - 1 and rng.random() < 0.1:
        return LARGE_STAGE
    return STAGES[rng.integers(hardest + 1) if rng.random() < 0.2 else hardest]


def _draw_canvas(rng: np.random.Generator, stage: Stage, shrink: float) -> tuple[int, int]:
    """Canvas (width, height) in tokens of 32 px."""
    width = rng.integers(5, max(6, int(stage.max_width * shrink)) + 1)
    height = rng.integers(min(3, stage.max_height - 1), max(3, int(stage.max_height * shrink)) + 1)
    return int(width), int(height)


def _draw(
    rng: np.random.Generator, columns: int, rows: int, max_lines: int, max_chars: int
) -> Page:
    """A page of columns x rows tokens; one in four is loose: off the grid and resized."""
    width, height = columns * TOKEN_PX, rows * TOKEN_PX
    drawn_width, drawn_height, grid = width, height, GRID_PX
    if rng.random() < 0.25:
        grid = 1
        drawn_width, drawn_height = (
            width + int(rng.integers(-16, 16)),
            height + int(rng.integers(-16, 16)),
        )
    # Most pages are full of text: more to learn from per pixel.
    dense = rng.random() < 0.6
    page = draw_page(rng, drawn_width, drawn_height, max_lines, max_chars, dense, grid)
    grey = (
        degrade(rng, page.grey, rng.uniform(0, 0.9), angle=0.6) if rng.random() < 0.2 else page.grey
    )
    if (drawn_width, drawn_height) == (width, height):
        return Page(grey, page.text, page.centres)
    resized = np.asarray(Image.fromarray(grey).resize((width, height), Image.Resampling.BICUBIC))
    right, down = width / drawn_width, height / drawn_height
    return Page(
        resized,
        page.text,
        tuple((line, column, x * right, y * down) for line, column, x, y in page.centres),
    )


def slot_labels(page: Page) -> np.ndarray:
    """(T, SLOTS, 5) int64 in raster order: own, previous, next character, line, column."""
    height, width = page.grey.shape
    labels = np.full((height // TOKEN_PX, width // TOKEN_PX, SLOTS, 5), IGNORED, np.int64)
    labels[..., 0] = CLASSES[""]
    lines = page.text.split("\n")
    for line, column, x, y in page.centres:
        text = lines[line]
        before = text[column - 1] if column else ("\n" if line else "^")
        after = (
            text[column + 1] if column + 1 < len(text) else ("\n" if line + 1 < len(lines) else "^")
        )
        half = int(x // (TOKEN_PX // SLOTS))
        cell = labels[int(y // TOKEN_PX), half // SLOTS, half % SLOTS]
        cell[:] = CLASSES[text[column]], CLASSES[before], CLASSES[after], line, column
    return labels.reshape(-1, SLOTS, 5)


def _prompt(rng: np.random.Generator) -> str:
    draw = rng.random()
    if draw < 0.6:
        return PROMPTS[0]
    return PROMPTS[rng.integers(len(PROMPTS))] if draw < 0.9 else _filler(rng)


def _system(rng: np.random.Generator) -> str | None:
    draw = rng.random()
    if draw < 0.65:
        return None
    return SYSTEMS[rng.integers(len(SYSTEMS))] if draw < 0.9 else _filler(rng)


def _filler(rng: np.random.Generator) -> str:
    """A sentence without sense, so that the reader does not hang on the trained prompts."""
    sentence = " ".join(rng.choice(FILLER, int(rng.integers(3, 12))))
    return sentence.capitalize() + "."


def _requests(
    rng: np.random.Generator, texts: list[list[str]], canvases: list[tuple[int, int]]
) -> list[tuple[list[int], int]]:
    """Token ids of whole conversations, and where each answer starts.

    One system text and one prompt for the batch: drawn for each request, the rare long ones
    would pad every batch.
    """
    system, prompt, prompt_first = _system(rng), _prompt(rng).encode(), rng.random() < 0.6
    start, end = TOKEN_IDS["<|im_start|>"], TOKEN_IDS["<|im_end|>"]
    images: list[int] = []
    for columns, rows in canvases:
        pads = [TOKEN_IDS["<|image_pad|>"]] * (columns * rows)
        images += [TOKEN_IDS["<|vision_start|>"], *pads, TOKEN_IDS["<|vision_end|>"]]
    ids: list[int] = []
    if system is not None:
        ids += [start, *f"system\n{system}".encode(), end, *b"\n"]
    content = [*prompt, *images] if prompt_first else [*images, *prompt]
    ids += [start, *b"user\n", *content, end, *b"\n", start, *b"assistant\n"]
    return [([*ids, *"\n\n".join(pages).encode(), end], len(ids)) for pages in texts]


def answer_places(answer: list[int]) -> list[tuple[int, int, int]]:
    """(page, line, column) of each token of an answer; a line break stands one after its line."""
    page = line = column = 0
    places = []
    for token in answer:
        places.append((page, line, column))
        if token != ord("\n"):
            column += 1
        elif column:
            line, column = line + 1, 0
        else:  # second line break in a row: the next page
            page, line = page + 1, 0
    return places


def _pad(rows: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and next-token targets, both (B, L)."""
    length = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), length), TOKEN_IDS["<|endoftext|>"])
    targets = torch.full((len(rows), length), IGNORED)
    for number, (row, answer) in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        targets[number, answer - 1 : len(row) - 1] = torch.tensor(row[answer:])
    return ids, targets
