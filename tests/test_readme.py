"""Every command of the README runs, word for word and in its order, in a copy of the project."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, accuracy, texts_of

pytestmark = pytest.mark.engine

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^ *\$ (.+)$", README, flags=re.MULTILINE)
NOT_HERE = ("make test",)  # this is it


def test_the_two_commands_come_first() -> None:
    assert COMMANDS[:2] == ["make demo", "make test"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git knows of, in a fresh directory with the same virtual environment."""
    copy = tmp_path_factory.mktemp("project")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    (copy / ".venv").symlink_to(ROOT / ".venv")
    for name in ("pyproject.toml", "requirements/dev.txt"):
        os.utime(copy / name, (0, 0))  # else `make setup` may install the copy over the project
    return copy


@pytest.fixture(scope="module")
def outputs(project: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    """Each command's output; a command that fails stops here."""
    done = {}
    for command in COMMANDS:
        if command not in NOT_HERE:
            words = ["bash", "-c", f". .venv/bin/activate && {command}"]
            done[command] = subprocess.run(
                words, cwd=project, capture_output=True, text=True, timeout=600
            )
            said = done[command].stdout[-3000:] + done[command].stderr[-3000:]
            assert done[command].returncode == 0, f"{command}\n{said}"
    return done


def sample_texts() -> dict[str, str]:
    """custom_id → text of the sample documents."""
    texts = {}
    lines = (ROOT / "tests/cases/docs_truth.tsv").read_text(encoding="utf-8").splitlines()
    for file, page, text in (line.split("\t") for line in lines if not line.startswith("file\t")):
        paged = file.endswith((".tif", ".pdf"))
        texts[file + (f"#page={page}" if paged else "")] = text.replace("\\n", "\n")
    return texts


def test_the_demo_prints_the_text_of_every_sample_page(
    outputs: dict[str, subprocess.CompletedProcess[str]],
) -> None:
    printed = outputs["make demo"].stdout
    assert len(sample_texts()) == 7
    for custom_id, text in sample_texts().items():
        assert re.search(
            rf"^{re.escape(custom_id)} +{re.escape(text.splitlines()[0])}$", printed, re.M
        )


def test_the_samples_are_read(
    project: Path, outputs: dict[str, subprocess.CompletedProcess[str]]
) -> None:
    texts = texts_of(project / "jobs" / "nightly.jsonl")
    assert texts.keys() == sample_texts().keys()
    assert accuracy(texts, sample_texts()) >= 0.97


def test_the_rerun_reuses_every_answer(
    outputs: dict[str, subprocess.CompletedProcess[str]],
) -> None:
    again = outputs["pipeline run jobs/nightly.jsonl --engine run-batch --json"]
    report = json.loads(again.stdout)
    assert (report["requests"], report["reused"], report["engine_starts"]) == (7, 7, 0)


def test_the_samples_are_answered_alike_both_ways(
    outputs: dict[str, subprocess.CompletedProcess[str]],
) -> None:
    printed = outputs["pipeline parity docs/ --dtype float32"].stdout
    assert "7 of 7 answers identical to the last token" in printed


@pytest.mark.parametrize("command", ["encode", "run", "parity", "golden", "model", "emit", "cache"])
def test_help_has_an_example(command: str) -> None:
    words = [str(ROOT / ".venv/bin/pipeline"), command, "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert f"Example:\n    pipeline {command} " in done.stdout
