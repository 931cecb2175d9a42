"""How do time and memory grow with the number of cache entries? 10,000, 100,000, a million.

Entries are sparse files of 1 MB under real names, so only names and sizes are read: whole
processes of `pipeline cache stats` and `pipeline cache gc` (dry), and 10,000 look-ups of one
entry each. Making a million files takes longer than counting them. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

COUNTS = (10_000, 100_000, 1_000_000)
TOWERS = ("7" * 64, "8" * 64)
ENTRY_BYTES = 1_000_000
YEAR_S = 365 * 86_400
LOOK_UPS = 10_000


def main() -> None:
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        cache, draw, there = Path(directory) / "cache", random.Random(0), 0
        for count in COUNTS:
            while there < count:
                add(cache, draw)
                there += 1
            budget = str(count * ENTRY_BYTES // 2)
            stats = measured("stats", cache)
            gc = measured("gc", cache, "--max-bytes", budget)
            assert stats[2]["entries"] == count and gc[2]["evicted"] == count // 2
            figures[str(count)] = row = {
                "stats_s": round(stats[0], 2),
                "stats_mb": round(stats[1] / 1e6),
                "gc_s": round(gc[0], 2),
                "gc_mb": round(gc[1] / 1e6),
                "look_up_us": round(look_up(cache, draw), 1),
            }
            print(f"{count:>9,} entries: " + ", ".join(f"{k} {v}" for k, v in row.items()))
    assert all(row["gc_mb"] < 500 and row["stats_mb"] < 500 for row in figures.values())
    print(json.dumps(figures))


def add(cache: Path, draw: random.Random) -> None:
    key = draw.randbytes(32).hex()
    folder = cache / "v1" / TOWERS[draw.randrange(2)] / key[:2]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key}.parquet"
    path.touch()
    os.truncate(path, ENTRY_BYTES)
    used_s = time.time() - draw.random() * YEAR_S
    os.utime(path, (used_s, used_s))


def measured(command: str, cache: Path, *words: str) -> tuple[float, int, dict[str, int]]:
    """Wall seconds and largest memory in bytes of one command, and its report."""
    call = [sys.executable, "-m", "pipeline", "cache", command, "--cache", str(cache), "--json"]
    read, write = os.pipe()
    started = time.monotonic()
    child = os.posix_spawn(
        call[0], [*call, *words], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)]
    )
    os.close(write)
    with os.fdopen(read, "rb") as out:
        report = json.loads(out.read())
    _, status, usage = os.wait4(child, 0)
    assert status == 0, status
    return time.monotonic() - started, usage.ru_maxrss << 10, report


def look_up(cache: Path, draw: random.Random) -> float:
    """Microseconds for the question whether the cache has a key that it lacks."""
    from pipeline.store import Store

    store, keys = Store(cache, TOWERS[0]), [draw.randbytes(32).hex() for _ in range(LOOK_UPS)]
    started = time.monotonic()
    assert not any(map(store.has, keys))
    return (time.monotonic() - started) / LOOK_UPS * 1e6


if __name__ == "__main__":
    main()
