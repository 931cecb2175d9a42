"""Statistics, and `gc`: least recently used first, dry by default, never what must stay."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from makers_cache import OTHER_TOWER, TOWER, another_process, files_of, put, put_manifest

from pipeline.errors import LockedError
from pipeline.store import Store
from pipeline.store.census import statistics, take_census
from pipeline.store.sweep import Budget, sweep

NOW_S = float(int(time.time()))
AGES_DAYS = (0.5, 3, 20, 60, 200, 800)


@pytest.fixture
def aged(tmp_path: Path) -> dict[float, Path]:
    """Entries of two towers by their age in days, oldest put last."""
    towers = (TOWER, OTHER_TOWER)
    return {
        age: put(tmp_path, number, towers[number % 2], age_days=age, now_s=NOW_S)
        for number, age in enumerate(AGES_DAYS)
    }


def left(aged: dict[float, Path]) -> list[float]:
    return [age for age, path in aged.items() if path.exists()]


def size(aged: dict[float, Path], *ages: float) -> int:
    return sum(aged[age].stat().st_size for age in ages or aged)


# ---------------------------------------------------------------- stats


def test_everything_is_counted(tmp_path: Path, aged: dict[float, Path]) -> None:
    put_manifest(tmp_path)
    temporary = aged[3].with_name(f".{aged[3].name}.1.ab.tmp")
    temporary.write_bytes(b"half")
    (tmp_path / "v1" / "notes.txt").write_text("what")
    Store(tmp_path, TOWER).quarantine(put(tmp_path, 99).stem, "a test")
    found = statistics(take_census(tmp_path), NOW_S)
    assert (found.entries, found.bytes) == (6, size(aged))
    assert [(each.fingerprint, each.family, each.entries) for each in found.towers] == [
        (TOWER, "qwen3_vl", 3),
        (OTHER_TOWER, "qwen3_vl", 3),
    ]
    assert sum(each.bytes for each in found.towers) == found.bytes
    assert found.towers[0].last_use_s == NOW_S - 0.5 * 86_400
    assert [(each.up_to_days, each.entries) for each in found.ages] == [
        (1, 1), (7, 1), (30, 1), (90, 1), (365, 1), (None, 1),
    ]  # fmt: skip
    assert sum(each.bytes for each in found.ages) == found.bytes
    assert (found.documents.files, found.foreign.files, found.quarantine.files) == (1, 1, 2)
    assert (found.temporary.files, found.temporary.bytes) == (1, 4)


def test_an_empty_cache_has_nothing(tmp_path: Path) -> None:
    found = statistics(take_census(tmp_path))
    assert (found.entries, found.bytes, found.towers) == (0, 0, ())
    assert sweep(tmp_path, Budget(1), apply=True).evicted == 0


def test_a_damaged_entry_is_counted_without_its_family(tmp_path: Path) -> None:
    put(tmp_path, 1).write_bytes(b"cut")
    (tower,) = statistics(take_census(tmp_path)).towers
    assert (tower.family, tower.entries, tower.bytes) == (None, 1, 3)


def test_counting_takes_little_memory_per_entry(tmp_path: Path) -> None:
    """50 bytes an entry as stored, so a million stay below 500 MB; see `benchmarks/`."""
    code = (
        "import sys, tracemalloc; from pathlib import Path\n"
        "from pipeline.store.census import take_census\n"
        "tracemalloc.start(); census = take_census(Path(sys.argv[1]))\n"
        "print(census.entries, tracemalloc.get_traced_memory()[1])"
    )
    count = 20_000
    for number in range(count):
        key = f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}" * 4
        folder = tmp_path / "v1" / TOWER / key[:2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{key}.parquet").touch()
    words = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    entries, peak_bytes = map(int, done.stdout.split())
    assert entries == count
    assert peak_bytes < 200 * count + 1_000_000


# ---------------------------------------------------------------- gc


def test_gc_is_dry_by_default(tmp_path: Path, aged: dict[float, Path]) -> None:
    before = files_of(tmp_path)
    swept = sweep(tmp_path, Budget(1))
    assert (swept.applied, swept.evicted, swept.evicted_bytes) == (False, 6, size(aged))
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("stay", range(7))
def test_the_least_recently_used_go_first(
    tmp_path: Path, aged: dict[float, Path], stay: int
) -> None:
    total = size(aged)
    budget = size(aged, *AGES_DAYS[:stay]) if stay else 1
    dry = sweep(tmp_path, Budget(budget))
    swept = sweep(tmp_path, Budget(budget), apply=True)
    assert left(aged) == list(AGES_DAYS[:stay])
    assert (swept.entries, swept.bytes, swept.evicted) == (6, total, 6 - stay)
    assert (dry.evicted, dry.evicted_bytes) == (swept.evicted, swept.evicted_bytes)
    assert swept.over_budget_bytes == 0
    assert sum(path.stat().st_size for path in aged.values() if path.exists()) <= budget


def test_one_byte_above_the_budget_costs_one_entry(tmp_path: Path, aged: dict[float, Path]) -> None:
    assert sweep(tmp_path, Budget(size(aged))).evicted == 0
    assert sweep(tmp_path, Budget(size(aged) - 1)).evicted == 1


def test_what_was_used_since_stays_even_above_the_budget(
    tmp_path: Path, aged: dict[float, Path]
) -> None:
    young = (0.5, 3, 20, 60)
    swept = sweep(tmp_path, Budget(1, NOW_S - 90 * 86_400), apply=True)
    assert left(aged) == list(young)
    assert swept.over_budget_bytes == size(aged, *young) - 1


def test_what_is_needed_stays_however_old(tmp_path: Path, aged: dict[float, Path]) -> None:
    needed = {aged[800].stem, aged[60].stem}
    swept = sweep(tmp_path, Budget(1), needed=lambda: needed, apply=True)
    assert left(aged) == [60, 800]
    assert (swept.kept, swept.evicted) == (2, 4)
    assert swept.over_budget_bytes == size(aged, 60, 800) - 1


def test_a_read_entry_is_no_longer_the_oldest(tmp_path: Path, aged: dict[float, Path]) -> None:
    tower = (TOWER, OTHER_TOWER)[AGES_DAYS.index(800) % 2]
    Store(tmp_path, tower).get(aged[800].stem)
    sweep(tmp_path, Budget(size(aged, 800)), apply=True)
    assert left(aged) == [800]


def test_gc_refuses_while_another_process_uses_the_cache(
    tmp_path: Path, aged: dict[float, Path]
) -> None:
    with another_process(tmp_path):
        with pytest.raises(LockedError):
            sweep(tmp_path, Budget(1), apply=True)
        assert sweep(tmp_path, Budget(1)).evicted == 6  # dry, it only looks
    assert left(aged) == list(AGES_DAYS)


def test_manifests_and_other_files_are_not_swept(tmp_path: Path, aged: dict[float, Path]) -> None:
    kept = put_manifest(tmp_path)
    (tmp_path / "v1" / "notes.txt").write_text("?")
    sweep(tmp_path, Budget(1), apply=True)
    assert kept.is_file() and (tmp_path / "v1" / "notes.txt").is_file()
