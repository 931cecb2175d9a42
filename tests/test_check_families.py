"""Every family on the real vLLM: cached embeddings give the native path's answers.

Writes the README's table of families. One family alone: `-k qwen2_5_vl`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Pipeline, results_of
from family_proof import MAKERS, Row, drivers_of, family_in, prove, write_table

from pipeline.checkpoint import resolve_model

pytestmark = [pytest.mark.check, pytest.mark.engine]


@pytest.fixture(scope="module")
def table() -> Iterator[list[Row]]:
    """Rows of this run; written when all have been tried."""
    rows: list[Row] = []
    yield rows
    write_table(rows)


@pytest.mark.parametrize("name", MAKERS)
def test_cached_embeddings_answer_as_images_do(
    name: str,
    tmp_path: Path,
    table: list[Row],
    pipeline: Pipeline,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = MAKERS[name](tmp_path / name)
    family = family_in(checkpoint)
    drivers = drivers_of(family)
    report = prove(checkpoint, tmp_path, drivers)
    dtype = family.cpu_dtype or "float32"
    row = Row(name, str(family.delivery), bool(family.patches), dtype, report, drivers)
    with capsys.disabled():
        print(f"\n{row.as_markdown()}")
    table.append(row)
    assert report.requests == 3
    assert report.different == ()
    assert report.cosine_min is not None and report.cosine_min >= 0.99999
    answers = {answer.token_ids for answer in report.answers.values()}
    assert len(answers) == 3, "the answers do not depend on the pages"

    job = write_job(tmp_path, checkpoint)
    words = ["run", job.name, "--model", checkpoint, "--quiet", "--json"]
    if drivers == ("llm",):
        refused = pipeline(*words, "--engine", "run-batch", cwd=tmp_path, code=2)
        assert "batch runner can't be handed this model's embeddings" in refused.stderr
    record = json.loads(pipeline(*words, cwd=tmp_path).stdout)  # default engine settings
    assert (record["requests"], record["succeeded"]) == (3, 3)
    assert len(results_of(job)) == 3


def write_job(work: Path, checkpoint: Path) -> Path:
    """Each page alone, then both, as people write it."""
    job = work / "job.jsonl"
    lines = []
    for names in (["a.png"], ["b.png"], ["a.png", "b.png"]):
        parts = [{"type": "image_url", "image_url": {"url": f"pages/{name}"}} for name in names]
        content = [*parts, {"type": "text", "text": "Read."}]
        body = {
            "model": resolve_model(str(checkpoint)).name,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 8,
        }
        line = {"method": "POST", "url": "/v1/chat/completions", "custom_id": "+".join(names)}
        lines.append(json.dumps(line | {"body": body}))
    job.write_text("\n".join(lines) + "\n")
    return job
