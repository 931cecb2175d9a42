"""A golden set tells a tower that computes otherwise, and what is no golden set."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import load_weights, make_qwen3_vl, save_weights
from conftest import Pipeline
from family_proof import write_pages

from pipeline.parity.answers import Answer, difference


@pytest.mark.check
@pytest.mark.engine
def test_a_changed_tower_is_told_page_by_page(tmp_path: Path, pipeline: Pipeline) -> None:
    pages = write_pages(tmp_path / "pages")
    model = make_qwen3_vl(tmp_path / "model", dtype=torch.float32)
    words = ["pages", "--out", "golden", "--model", model, "--max-tokens", 8]
    words += ["--dtype", "float32", "--json", "--quiet"]
    made = json.loads(pipeline("golden", "record", *words, cwd=tmp_path).stdout)
    assert (made["requests"], made["cosine_min"]) == (2, 1.0)

    changed = shutil.copytree(model, tmp_path / "changed")
    weights = load_weights(changed)
    weights["model.visual.blocks.0.attn.qkv.weight"] *= 1.5
    save_weights(changed, weights, 3)
    shutil.rmtree(pages)  # the set holds its pages itself
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    done = pipeline(
        *("golden", "check", "golden", "--model", changed, "--json", "--quiet"),
        cwd=tmp_path, code=7,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert [page["file"] for page in found["pages"]] == ["0001-a.png", "0002-b.png"]
    assert all(page["cosine"] < 0.99999 and not page["same_bytes"] for page in found["pages"])
    assert found["then"]["tower_fingerprint"] != found["now"]["tower_fingerprint"]
    assert found["then"]["vllm"] == found["now"]["vllm"]
    assert found["requests"] == found["identical"] + len(found["different"]) == 2


def test_a_set_is_never_written_over(tmp_path: Path, pipeline: Pipeline) -> None:
    write_pages(tmp_path / "pages")
    (tmp_path / "golden").mkdir()
    done = pipeline("golden", "record", "pages", "--out", "golden", cwd=tmp_path, code=2)
    assert "`golden` is there already" in done.stderr


def test_a_page_that_can_not_be_read_is_named(tmp_path: Path, pipeline: Pipeline) -> None:
    write_pages(tmp_path / "pages")
    (tmp_path / "pages" / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    done = pipeline("golden", "record", "pages", "--out", "golden", cwd=tmp_path, code=1)
    assert "can't be recorded" in done.stderr and "cut.png" in done.stderr
    assert not (tmp_path / "golden").exists()
    assert list(tmp_path.glob(".golden*")) == []


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format_version": 99}'])
def test_what_is_no_golden_set_is_said(
    tmp_path: Path, pipeline: Pipeline, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "golden.json").write_text(content)
    done = pipeline("golden", "check", tmp_path, cwd=tmp_path, code=1)
    assert "golden" in done.stderr and "Traceback" not in done.stderr


def test_the_first_difference_is_where_the_answers_part() -> None:
    one = Answer("abc", (1, 2, 3), ((-0.1, -2.0), (-0.5, -0.9), (-0.2, -3.0)))
    two = Answer("abd", (1, 2, 4), ((-0.1, -2.0), (-0.5, -0.9), (-0.2, -3.0)))
    short = Answer("ab", (1, 2), ((-0.1, -2.0), (-0.5, -0.9)))
    assert difference("x", one, one, "llm") is None
    found = difference("x", one, two, "llm")
    assert found is not None and (found.position, round(found.margin, 6)) == (2, 2.8)
    cut = difference("x", one, short, "llm")
    assert cut is not None and cut.position == 2
