"""`verify` reads everything and changes nothing; `repair` makes the cache whole again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from makers_cache import (
    OTHER_TOWER,
    TOWER,
    another_process,
    entry,
    files_of,
    put,
    put_manifest,
)

from pipeline.errors import LockedError, UsageError
from pipeline.store import BadEntry, Store
from pipeline.store.check import check_files
from pipeline.store.logbook import Logbook, read_progress
from pipeline.store.repair import Repaired, repair


def problems(root: Path) -> dict[str, str]:
    """What is wrong, by the file's name."""
    found = {file.name: file.why for file in check_files(root)}
    return {Path(name).name: why for name, why in found.items() if why is not None}


def verify(root: Path, state: Path | None, until: int | None = None) -> Logbook:
    """A verification that ends after so many files, as if it was killed."""
    logbook = Logbook(root, state)
    for number, file in enumerate(check_files(root, logbook.progress.after)):
        if number == until:
            logbook.mark()
            return logbook
        logbook.note(file)
    logbook.close()
    return logbook


def test_a_whole_cache_of_two_towers_has_no_problem(tmp_path: Path) -> None:
    for seed in range(3):
        put(tmp_path, seed)
        put(tmp_path, seed, OTHER_TOWER)
    put_manifest(tmp_path)
    assert [file.why for file in check_files(tmp_path)] == [None] * 7
    assert list(check_files(tmp_path / "none")) == []


def test_files_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    for seed in range(20):
        put(tmp_path, seed, TOWER if seed % 2 else OTHER_TOWER)
    put_manifest(tmp_path)
    names = [file.name for file in check_files(tmp_path)]
    assert names == sorted(names, key=lambda name: name.split("/")) and len(names) == 21
    for number, name in enumerate(names):
        assert [file.name for file in check_files(tmp_path, name)] == names[number + 1 :]


def test_every_flip_and_every_cut_is_found_or_harmless(tmp_path: Path) -> None:
    path, made = put(tmp_path, 1), entry(1)
    store, whole = Store(tmp_path, TOWER), path.read_bytes()
    for place in range(0, len(whole), 11):
        data = bytearray(whole)
        data[place] ^= 1 << (place % 8)
        path.write_bytes(data)
        got = store.get(path.stem)
        if isinstance(got, BadEntry):  # what a reader does not need is looked at, too
            assert problems(tmp_path).keys() == {path.name}, place
        else:
            assert got.footer == made.footer and np.array_equal(got.bits(), made.bits()), place
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        assert problems(tmp_path).keys() == {path.name}, length
    path.write_bytes(whole)
    assert problems(tmp_path) == {}


def damage(root: Path) -> dict[str, str]:
    """A cache with one whole entry and one of each problem, by name."""
    put(root, 1)
    cut = put(root, 2, OTHER_TOWER)
    cut.write_bytes(cut.read_bytes()[:-9])
    other = put(root, 3)
    moved = other.with_name(other.name.translate(str.maketrans("0123456789abcdef", "f" * 16)))
    other.rename(moved)
    manifest = put_manifest(root)
    manifest.write_bytes(b"{")
    (cut.parent / f".{cut.name}.1.ab.tmp").write_bytes(b"half")
    (root / "v1" / "notes.txt").write_text("?")
    (cut.parent / f"{cut.name[:2]}{'0' * 62}.parquet").mkdir()
    return {
        cut.name: "the file is damaged: ",
        moved.name: "it lies in the wrong directory",
        manifest.name: "the manifest is unreadable: ",
        f".{cut.name}.1.ab.tmp": "a temporary file that was left over",
        "notes.txt": "a file that does not belong here",
        f"{cut.name[:2]}{'0' * 62}.parquet": "a directory stands where a file should be",
    }


def test_verify_names_each_problem_and_changes_nothing(tmp_path: Path) -> None:
    expected = damage(tmp_path)
    before = files_of(tmp_path)
    found = problems(tmp_path)
    assert found.keys() == expected.keys()
    assert all(found[name].startswith(why) for name, why in expected.items())
    assert files_of(tmp_path) == before


def test_in_a_cache_in_use_a_young_temporary_file_is_no_problem(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    temporary = path.with_name(f".{path.name}.1.ab.tmp")
    temporary.write_bytes(b"half")
    with another_process(tmp_path):
        assert problems(tmp_path) == {}
        os.utime(temporary, (time.time() - 7200,) * 2)
        assert problems(tmp_path).keys() == {temporary.name}


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize("until", [0, 1, 4, 6])
def test_a_verification_goes_on_where_it_stopped(tmp_path: Path, until: int) -> None:
    cache, state = tmp_path / "cache", tmp_path / "state"
    damage(cache)
    whole = verify(cache, None).progress
    first = verify(cache, state, until)
    assert first.progress.files == until < whole.files
    again = Logbook(cache, state)
    assert again.progress.files == first.progress.files
    rest = [file.name for file in check_files(cache, again.progress.after)]
    assert len(rest) == whole.files - first.progress.files
    second = verify(cache, state).progress
    assert (second.files, second.bytes, second.problems) == (
        whole.files, whole.bytes, whole.problems,
    )  # fmt: skip
    assert read_progress(cache, state).done


def test_a_finished_verification_begins_anew(tmp_path: Path) -> None:
    cache, state = tmp_path / "cache", tmp_path / "state"
    put(cache, 1)
    verify(cache, state)
    assert Logbook(cache, state).progress.files == 0


def test_what_was_not_marked_is_read_again(tmp_path: Path) -> None:
    cache, state = tmp_path / "cache", tmp_path / "state"
    damage(cache)
    verify(cache, state, 4)
    marked = state.read_bytes()
    known = read_progress(cache, state)
    for tail in (b'{"problem":"v1/x","why":"?"}\n', b'{"problem":"v1/x"', b'{"aft'):
        state.write_bytes(marked + tail)
        assert read_progress(cache, state) == known
        assert Logbook(cache, state).progress == known


def test_the_state_of_another_cache_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "a", 1)
    verify(tmp_path / "a", tmp_path / "state")
    with pytest.raises(UsageError, match="is of the cache"):
        Logbook(tmp_path / "b", tmp_path / "state")
    (tmp_path / "notes").write_text("my notes")
    with pytest.raises(UsageError, match="no state file"):
        Logbook(tmp_path / "a", tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "my notes"


# ---------------------------------------------------------------- repair


def test_after_repair_the_cache_is_whole_and_nothing_else_is_gone(tmp_path: Path) -> None:
    expected = damage(tmp_path)
    before = files_of(tmp_path)
    done = list(repair(tmp_path))
    assert {Path(each.path).name for each in done} == expected.keys()
    assert problems(tmp_path) == {}
    after = files_of(tmp_path)
    (whole,) = (name for name in after if not name.startswith("quarantine"))
    assert before[whole] == after[whole]
    for each in done:
        assert (each.moved_to is None) is each.path.endswith(".tmp")
        if each.moved_to is not None and each.path in before:
            assert after[each.moved_to] == before[each.path]
            reason = (tmp_path / each.moved_to).with_suffix(".txt").read_text()
            assert reason == f"{each.why}\n"
    assert list(repair(tmp_path)) == []


def test_repair_takes_what_was_found_before_and_reads_it_again(tmp_path: Path) -> None:
    damage(tmp_path)
    whole = put(tmp_path, 9)
    names = [f"{TOWER}/{whole.parent.name}/{whole.name}", "notes.txt", "../../x", "/etc/passwd"]
    (done,) = repair(tmp_path, names)
    assert done.path == "v1/notes.txt" and whole.is_file()
    assert len(problems(tmp_path)) == 5


def test_repair_removes_temporary_files_of_the_quarantine(tmp_path: Path) -> None:
    put(tmp_path, 1)
    (tmp_path / "quarantine").mkdir()
    (tmp_path / "quarantine" / ".x.txt.1.ab.tmp").write_bytes(b"")
    assert list(repair(tmp_path)) == [
        Repaired("quarantine/.x.txt.1.ab.tmp", "a temporary file that was left over", None)
    ]


def test_repair_takes_away_what_killed_writers_left(tmp_path: Path) -> None:
    code = (
        "import sys, os, time; sys.path.insert(0, sys.argv[2]); from makers_cache import *\n"
        "from pipeline.store.hold import hold_shared\n"
        "root = Path(sys.argv[1]); replace = os.replace; calls = []\n"
        "def stalling(*given):\n"
        "    calls.append(given)\n"
        "    if len(calls) == 4: print('go', flush=True); time.sleep(600)\n"
        "    replace(*given)\n"
        "os.replace = stalling\n"
        "with hold_shared(root):\n"
        "    for seed in range(100_000): put(root, int(sys.argv[3]) + seed)"
    )
    for start in (0, 1_000_000, 2_000_000):
        words = [sys.executable, "-c", code, tmp_path, Path(__file__).parent, str(start)]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"go\n"
            writer.kill()
    entries = {path: path.read_bytes() for path in tmp_path.rglob("[!.]*.parquet")}
    left = list(tmp_path.rglob("*.tmp"))
    assert set(problems(tmp_path).values()) <= {"a temporary file that was left over"}
    assert len(list(repair(tmp_path))) == len(left) == 3 and len(entries) == 9
    assert problems(tmp_path) == {} and not list(tmp_path.rglob("*.tmp"))
    assert entries == {path: path.read_bytes() for path in tmp_path.rglob("*.parquet")}


def test_repair_refuses_while_another_process_uses_the_cache(tmp_path: Path) -> None:
    damage(tmp_path)
    before = files_of(tmp_path)
    with another_process(tmp_path), pytest.raises(LockedError):
        list(repair(tmp_path))
    assert files_of(tmp_path) == before
