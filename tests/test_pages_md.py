"""PAGES.md says what the code does: its reasons, its choices, its commands."""

from __future__ import annotations

import csv
import os
import re
import subprocess

import pytest
from conftest import ROOT
from test_corpus import CORPUS, PAGES, REFUSED, SKIPPED

from pipeline.cli.advice import ADVICE, HINTS
from pipeline.errors import REASONS, Reason, Stage

TEXT = (ROOT / "PAGES.md").read_text(encoding="utf-8")


def block(name: str) -> list[str]:
    """The lines between the marks of a name."""
    found = re.search(rf"<!-- {name}: begin -->\n(.*?)\n?<!-- {name}: end -->", TEXT, re.DOTALL)
    assert found, f"PAGES.md has no block `{name}`"
    return found[1].splitlines()


def reason_rows() -> list[str]:
    rows = ["| stage | reason | meaning | what to do |", "|---|---|---|---|"]
    for stage in Stage:
        for reason in Reason:
            if reason in REASONS[stage]:
                advice = ADVICE[reason]
                rows.append(f"| {stage} | `{reason}` | {advice.meaning} | {advice.hint} |")
    return rows


def choices() -> dict[str, str]:
    """Example file → its outcome, from the table."""
    outcomes = {}
    for row in block("choices")[2:]:
        _, outcome, _, examples = (cell.strip() for cell in row.strip("|").split("|"))
        outcomes |= {name: outcome for name in re.findall("`(.+?)`", examples)}
    return outcomes


def test_every_reason_has_a_meaning_and_a_hint() -> None:
    assert set(ADVICE) == set(HINTS) == set(Reason)
    assert set().union(*REASONS.values()) == set(Reason)
    for reason, advice in ADVICE.items():
        for text in (advice.meaning, advice.hint):
            assert text and "|" not in text and not text.endswith("."), reason


def test_the_table_of_reasons_is_that_of_the_code() -> None:
    assert block("reasons") == reason_rows(), "\n".join(["the rows are:", *reason_rows()])


@pytest.mark.parametrize(("name", "outcome"), choices().items(), ids=list(choices()))
def test_a_choice_is_what_the_corpus_is_tested_for(name: str, outcome: str) -> None:
    if outcome == "skipped":
        assert name in SKIPPED
    elif found := re.fullmatch(r"(\d+) pages?", outcome):
        assert name not in REFUSED and PAGES.get(name, 1) == int(found[1])
    else:
        assert REFUSED[name] == (Reason(outcome.strip("`")),)


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus stands elsewhere")
def test_every_file_that_may_end_either_way_is_in_the_table() -> None:
    with open(CORPUS / "INDEX.tsv", encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))
    either = {row["path"] for row in rows if re.search(r"\bor\b|documented", row["right_outcome"])}
    assert either <= set(choices())


def test_the_readme_leads_here() -> None:
    assert "PAGES.md" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", re.findall(r"^ *\$ (.+)$", TEXT, flags=re.MULTILINE))
def test_a_command_of_the_page_runs(command: str) -> None:
    path = f"{ROOT / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("1 page, 0 files skipped\n")
