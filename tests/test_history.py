"""What the cache remembers of the last runs: some, the last first, and never at a run's cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from makers_cache import put

from pipeline.store.history import last_look_ups, note_look_ups


def note(root: Path, pages: int) -> None:
    note_look_ups(root, "encode", pages=pages, cached=pages, encoded=0, failed=0)


def test_the_last_runs_are_kept(tmp_path: Path) -> None:
    put(tmp_path, 1)
    for number in range(80):
        note(tmp_path, number)
    assert [run.pages for run in last_look_ups(tmp_path, 3)] == [79, 78, 77]
    assert 50 <= len(list((tmp_path / "runs").iterdir())) <= 75


def test_a_run_of_no_page_has_no_rate(tmp_path: Path) -> None:
    put(tmp_path, 1)
    note(tmp_path, 0)
    (run,) = last_look_ups(tmp_path, 9)
    assert run.hit_rate is None and run.as_record()["hit_rate"] is None


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"[" * 100_000, b"\xff"])
def test_what_is_no_record_is_left_out(tmp_path: Path, content: bytes) -> None:
    put(tmp_path, 1)
    note(tmp_path, 5)
    (tmp_path / "runs" / "9-strange.json").write_bytes(content)
    (tmp_path / "runs" / "9").mkdir()
    assert [run.pages for run in last_look_ups(tmp_path, 9)] == [5]


def test_no_cache_is_made_for_it(tmp_path: Path) -> None:
    note(tmp_path / "none", 5)
    assert not (tmp_path / "none").exists() and last_look_ups(tmp_path / "none", 9) == ()


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    put(tmp_path, 1)
    (tmp_path / "runs").write_text("in the way")
    note(tmp_path, 5)
    assert json.dumps([run.as_record() for run in last_look_ups(tmp_path, 9)]) == "[]"
