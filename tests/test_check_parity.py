"""120 pages, easy and hard: cached embeddings give the native path's answers to the last token."""

import json
from pathlib import Path

import pytest
from conftest import Pipeline

pytestmark = [pytest.mark.check, pytest.mark.engine]


def test_answers_are_identical_misreads_among_them(
    tmp_path: Path, pipeline: Pipeline, render, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pages").mkdir()
    truth = []
    for seed in (1, 2, 3):
        for kind, options in (("easy", ()), ("hard", ("--hard",))):
            pages = render(seed, 20, *options)
            for line in (pages / "truth.tsv").read_text().splitlines():
                name, text = line.split("\t")
                (pages / name).rename(tmp_path / "pages" / f"{seed}-{kind}-{name}")
                truth.append(f"{seed}-{kind}-{name}\t{text}\n")
    (tmp_path / "truth.tsv").write_text("".join(truth))
    words = ["pages", "--dtype", "float32", "--truth", "truth.tsv", "--json"]
    record = json.loads(pipeline("parity", *words, cwd=tmp_path, timeout_s=1800).stdout)
    with capsys.disabled():
        print(f"\n{record}")
    assert record["pages"] == 120
    assert all(difference["margin"] < 1e-3 for difference in record["different"])
    assert record["identical"] + len(record["different"]) == 120
    assert record["right"] > 0 and record["misread"] > 0
    assert record["cosine_min"] > 0.9999
