"""Damage anywhere in a file of any kind ends as a page or a reason; never a crash or a hang."""

from __future__ import annotations

from pathlib import Path

from page_fuzz import MEMORY_LIMIT_BYTES, fuzz, seeds, write_files
from test_pages import pages_of

from pipeline.errors import REASONS, Stage
from pipeline.pages import Page


def test_every_seed_is_a_good_file(tmp_path: Path) -> None:
    for name, data in seeds().items():
        (tmp_path / "page").write_bytes(data)
        assert {type(page) for page in pages_of(tmp_path / "page", dpi=72)} == {Page}, name


def test_damaged_files_are_the_same_each_time(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = (write_files(tmp_path / name, 3, 60) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


STAGES = (Stage.READ, Stage.DECODE, Stage.RESIZE)


def test_400_damaged_files_end_as_pages_or_reasons(tmp_path: Path) -> None:
    done = fuzz(tmp_path, seed=1, count=400)
    reasons = {reason.value for stage in STAGES for reason in REASONS[stage]}
    seen = {outcome for outcomes in done.outcomes for outcome in outcomes}
    assert all(done.outcomes) and seen <= {"page"} | reasons
    assert {
        "page",
        "corrupt",
        "truncated",
        "aspect_ratio",
    } <= seen  # the damage is not all of a kind
    assert done.peak_bytes < MEMORY_LIMIT_BYTES
