"""Two families beside the bundled one on the real vLLM; `make check PART=families` tries all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from family_proof import BEGIN, END, MAKERS, README, prove

import pipeline.families

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", ["qwen2_5_vl", "mistral3"])
def test_cached_embeddings_answer_as_images_do(name: str, tmp_path: Path) -> None:
    report = prove(MAKERS[name](tmp_path / name), tmp_path, ("llm",))
    assert (report.requests, report.different) == (3, ())
    assert report.cosine_min is not None and report.cosine_min >= 0.99999
    answers = {answer.token_ids for answer in report.answers.values()}
    assert len(answers) == 3, "the answers do not depend on the pages"


def test_the_readme_names_every_family_as_proven_or_not() -> None:
    table = README.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    stated = {line.split("|")[1].strip() for line in table.splitlines()[3:] if line}
    unproven = re.search(r"without a row \((.*?)\) is not proven yet", README.read_text(), re.S)
    missing = set(re.findall(r"`(\w+)`", unproven[1])) if unproven else set()
    assert not stated & missing
    assert stated | missing == set(MAKERS)
    supported = {module.rsplit(".", 1)[1] for module in pipeline.families._MODULES.values()}
    assert supported <= set(MAKERS)
