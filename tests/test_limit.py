"""Too many failures end `encode` early; what is done stays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from pipeline.cli import main
from pipeline.encode import Done, FailureLimit, Outcome
from pipeline.encode.limit import until_exceeded
from pipeline.errors import ExitCode, Failure, Reason, Stage, UsageError
from pipeline.pages import Discovery, SourceFile

BAD = Failure("bad.png", None, Stage.DECODE, Reason.CORRUPT)
FILE = SourceFile(Path("good.png"), "png")
GOOD = Done(FILE, 1, "0" * 64, 4, 4096, None)


def stream(text: str) -> Iterator[Outcome]:
    """`+` is a page that is done, `-` one that failed."""
    return (GOOD if each == "+" else BAD for each in text)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("0", FailureLimit(count=0)),
        ("10", FailureLimit(count=10)),
        ("5%", FailureLimit(percent=5)),
        ("0%", FailureLimit(percent=0)),
        ("100%", FailureLimit(percent=100)),
        ("2.5%", FailureLimit(percent=2.5)),
    ],
)
def test_a_limit_is_a_number_or_a_percentage(text: str, limit: FailureLimit) -> None:
    assert FailureLimit.parse(text) == limit


@pytest.mark.parametrize("text", ["", "-1", "x", "101%", "%", "1.5", "5 %", "1e3", "٣", "nan%"])
def test_other_limits_are_usage_errors(text: str) -> None:
    with pytest.raises(UsageError, match="no number of pages and no percentage"):
        FailureLimit.parse(text)


@pytest.mark.parametrize(
    ("limit", "missing", "files", "outcomes", "seen"),
    [
        (None, 9, 30, "-" * 30, 30),
        # the failure after the last one that is allowed is the last outcome
        ("2", 0, 9, "+-+-+-+-+", 6),
        ("2", 0, 5, "+-+-+", 5),
        ("0", 0, 3, "++-", 3),
        ("0", 0, 3, "-++", 1),
        # files that were not found count, and come first
        ("2", 1, 4, "+--+", 3),
        ("2", 3, 4, "++++", 0),
        # a percentage is judged from 20 pages on
        ("10%", 0, 19, "-" * 19, 19),
        ("10%", 0, 30, "-" * 30, 20),
        ("10%", 1, 29, "-" * 29, 19),
        # and of the pages that are known to come: ten of 100 are not more than a tenth
        ("10%", 0, 100, "-" * 10 + "+" * 90, 100),
        ("10%", 0, 100, "-" * 100, 20),
        ("10%", 25, 300, "+" * 300, 300),
        ("10%", 40, 300, "+" * 300, 0),
        # a document's pages come one by one
        ("10%", 0, 1, "+" * 27 + "-" * 9, 31),
        ("100%", 0, 40, "-" * 40, 40),
    ],
)
def test_the_outcomes_end_with_the_failure_that_is_one_too_many(
    limit: str | None, missing: int, files: int, outcomes: str, seen: int
) -> None:
    parsed = None if limit is None else FailureLimit.parse(limit)
    found = Discovery((FILE,) * files, 0, (BAD,) * missing)
    passed = list(until_exceeded(stream(outcomes), found, parsed))
    assert len(passed) == seen
    if parsed is not None:  # the report's own numbers tell whether the call was stopped
        failed = missing + sum(outcome is BAD for outcome in passed)
        stopped = parsed.exceeded(missing + len(passed), failed)
        assert stopped == (seen < len(outcomes) or outcomes in ("++-",))


# ---------------------------------------------------------------- the command


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """Three good pages, three cut ones, then a good one."""
    directory = tmp_path / "docs"
    directory.mkdir()
    for number in range(7):
        values = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        path = directory / f"{number}.png"
        Image.fromarray(values).save(path)
        if number in (3, 4, 5):
            path.write_bytes(path.read_bytes()[:5000])
    return directory


def encode(docs: Path, *words: object) -> Result:
    cache = docs.parent / "cache"
    return CliRunner().invoke(main, ["encode", str(docs), "--cache", str(cache), *map(str, words)])


def test_the_command_stops_and_keeps_what_is_done(docs: Path) -> None:
    job = docs.parent / "job.jsonl"
    words = ("--json", "--job", job, "--prompt", "Read.")
    result = encode(docs, "--max-failures", 1, *words)
    report = json.loads(result.stdout)
    assert result.exit_code == ExitCode.STOPPED
    assert (report["stopped"], report["encoded"], report["failed"]) == (True, 3, 2)
    assert result.stderr.endswith(
        "stopped early: 2 of 5 pages failed, more than --max-failures 1; the job is not written\n"
    )
    decoders = [
        each for each in psutil.Process().children() if "pipeline.pages.worker" in each.cmdline()
    ]
    assert decoders == [], "they end with the call"
    assert not job.exists(), "a job of some pages would pass for one of all"

    result = encode(docs, "--max-failures", 3, *words)
    report = json.loads(result.stdout)
    assert result.exit_code == ExitCode.SOME_FAILED
    assert (report["stopped"], report["cached"], report["encoded"]) == (False, 3, 1)
    assert len(job.read_text().splitlines()) == 4


def test_a_percentage_of_few_pages_stops_nothing(docs: Path) -> None:
    result = encode(docs, "--max-failures", "5%", "--json")
    assert result.exit_code == ExitCode.SOME_FAILED
    assert json.loads(result.stdout)["stopped"] is False


def test_a_limit_that_can_not_be_meant_is_a_usage_error(docs: Path) -> None:
    result = encode(docs, "--max-failures", "some")
    assert (result.exit_code, result.stderr) == (
        2,
        "Error: `--max-failures some` is no number of pages and no percentage\n\n"
        "hint: give one like `10` or `5%`\n",
    )
