"""Embeddings that a job brings along: every fault that vLLM dies or lies of is found first."""

from __future__ import annotations

import base64
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.families import Delivery
from pipeline.geometry import PixelBudget
from pipeline.run import inline
from pipeline.run.inline import InlineForm, inline_faults
from pipeline.run.survey import JobSource

WIDTH = 8
BUDGET = PixelBudget(16, 2, 1024, 1_048_576)
GRID = [1, 4, 6]
ROWS = torch.arange(6 * WIDTH, dtype=torch.float32).reshape(6, WIDTH) / 10


def b64(value: object) -> str:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def npy(value: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, value)
    return base64.b64encode(buffer.getvalue()).decode()


def fault_of(tmp_path: Path, held: Any, delivery: Delivery = Delivery.GRID, **more: Any) -> str:
    """What is said of a job whose second line brings `held` along; empty if nothing."""
    part = {"type": "image_embeds", "image_embeds": held, **more}
    lines = []
    for name, content in (("plain", "Hello"), ("bringer", [{"type": "text", "text": "?"}, part])):
        body = {"messages": [{"role": "user", "content": content}]}
        line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append(json.dumps(line) + "\n")
    job = tmp_path / "job.jsonl"
    job.write_text("".join(lines))
    source = JobSource.of(job, None, (), tmp_path / "attachments")
    faults = inline_faults(source, InlineForm(delivery, WIDTH, BUDGET))
    assert faults.keys() <= {"bringer"}
    return faults.get("bringer", "").removeprefix("content part 2: ")


def grid_form(rows: object = ROWS, grid: object = GRID, **more: Any) -> dict[str, Any]:
    text = rows if isinstance(rows, str) else b64(rows)
    return {"image_embeds": text, "image_grid_thw": grid, **more}


@pytest.mark.parametrize(
    "held",
    [
        grid_form(),
        grid_form(grid=b64(torch.tensor(GRID))),
        grid_form(ROWS.bfloat16()),
        grid_form(ROWS.half()),
        grid_form(ROWS.double()),
        grid_form(npy(ROWS.numpy())),
        grid_form(ROWS.T.contiguous().T),
    ],
    ids=["float32", "grid tensor", "bfloat16", "float16", "float64", "npy", "strided"],
)
def test_what_vllm_takes_is_taken(tmp_path: Path, held: dict[str, Any]) -> None:
    assert fault_of(tmp_path, held) == ""


FAULTS = {
    "main rows only": (grid_form(ROWS[:, :4]), "image_embeds has 4 columns instead of 8"),
    "too wide": (grid_form(torch.ones(6, 12)), "image_embeds has 12 columns instead of 8"),
    "a row too few": (grid_form(ROWS[1:]), "image_embeds has 5 rows, image_grid_thw asks for 6"),
    "a row too many": (
        grid_form(torch.ones(7, WIDTH)),
        "image_embeds has 7 rows, image_grid_thw asks for 6",
    ),
    "no rows": (grid_form(ROWS[:0]), "image_embeds has 0 rows, image_grid_thw asks for 6"),
    "rank 3": (grid_form(ROWS[None]), "image_embeds has shape (1, 6, 8) instead of (rows, 8)"),
    "rank 1": (grid_form(ROWS[0]), "image_embeds has shape (8,) instead of (rows, 8)"),
    "integers": (
        grid_form(ROWS.to(torch.int8)),
        "image_embeds is torch.int8 instead of floating point",
    ),
    "NaN": (grid_form(ROWS / 0), "image_embeds has values that are not finite"),
    "sparse": (
        grid_form(ROWS.to_sparse()),
        "image_embeds has shape (6, 8) instead of (rows, 8)",
    ),
    "two frames": (
        grid_form(grid=[2, 2, 6]),
        "image_grid_thw [[2, 2, 6]] is no grid of still images",
    ),
    "odd grid": (
        grid_form(grid=[1, 3, 8]),
        "image_grid_thw [[1, 3, 8]] is no grid of still images",
    ),
    "negative grid": (
        grid_form(grid=[1, -4, -6]),
        "image_grid_thw [[1, -4, -6]] is no grid of still images",
    ),
    "huge grid": (
        grid_form(grid=[1, 20000, 20000]),
        "image_embeds has 6 rows, image_grid_thw asks for 100000000",
    ),
    "grid of fractions": (
        grid_form(grid=[1.0, 4.0, 6.0]),
        "[1.0, 4.0, 6.0] is no list of 3 whole numbers",
    ),
    "grid of two": (grid_form(grid=[4, 6]), "[4, 6] is no list of 3 whole numbers"),
    "grid tensor of another shape": (
        grid_form(grid=b64(torch.tensor([GRID]))),
        "torch.int64 of shape (1, 3) instead of 3 numbers",
    ),
    "no grid": (
        {"image_embeds": b64(ROWS)},
        "image_embeds holds ['image_embeds'] instead of ['image_embeds', 'image_grid_thw']",
    ),
    "another key": (
        grid_form(more=1),
        "image_embeds holds ['image_embeds', 'image_grid_thw', 'more'] "
        "instead of ['image_embeds', 'image_grid_thw']",
    ),
    "tensor alone": (
        b64(ROWS),
        "image_embeds holds str instead of ['image_embeds', 'image_grid_thw']",
    ),
    "a reference": (
        grid_form("cache:" + "0" * 64),
        "references into the cache are made by the run, not by the job",
    ),
    "a dict pickled": (grid_form({"a": ROWS}), "no tensor but a dict"),
    "data url": (grid_form("data:;base64,AAAA"), "not base64: "),
    "cut": (grid_form(b64(ROWS)[:400]), "no tensor: "),
    "garbage": (grid_form(base64.b64encode(b"x" * 99).decode()), "no tensor: "),
    "objects in npy": (grid_form(npy(np.array([{}]))), "no tensor: "),
    "empty": (grid_form(""), "an embedding must be base64, found str"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named(tmp_path: Path, name: str) -> None:
    held, expected = FAULTS[name]
    found = fault_of(tmp_path, held)
    assert found.startswith(expected) if expected.endswith(": ") else found == expected


class Harmful:
    def __reduce__(self) -> Any:
        return (Path("harmed").touch, ())


def test_nothing_in_a_pickle_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert fault_of(tmp_path, grid_form(Harmful())).startswith("no tensor: ")
    assert not (tmp_path / "harmed").exists()


def test_an_embedding_that_unpacks_to_more_than_fits_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inline, "MAX_EMBEDDING_BYTES", 1 << 20)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", b"\0" * (2 << 20))
    text = base64.b64encode(buffer.getvalue()).decode()
    assert fault_of(tmp_path, grid_form(text)) == "2097152 bytes unpacked, more than 1048576"
    assert "of base64, more than" in fault_of(tmp_path, grid_form("A" * (2 << 20)))


def test_a_uuid_of_the_jobs_own_is_refused(tmp_path: Path) -> None:
    """vLLM answers a second page of the same uuid and shape with the first one's text."""
    assert "with a uuid" in fault_of(tmp_path, grid_form(), uuid="same")


def test_other_forms(tmp_path: Path) -> None:
    assert fault_of(tmp_path, b64(ROWS), Delivery.ROWS) == ""
    assert "columns" in fault_of(tmp_path, b64(ROWS[:, 1:]), Delivery.ROWS)
    assert "must be base64" in fault_of(tmp_path, grid_form(), Delivery.ROWS)
    sized = {"image_embeds": b64(ROWS), "image_sizes": [96, 64]}  # 3 x 2 tokens
    assert fault_of(tmp_path, sized, Delivery.SIZES) == ""
    wrong = fault_of(tmp_path, sized | {"image_sizes": [96, 96]}, Delivery.SIZES)
    assert wrong == "image_embeds has 6 rows, a page of 96 x 96 px asks for 9"
    assert "from the cache only" in fault_of(tmp_path, b64(ROWS), Delivery.PROMPT)
