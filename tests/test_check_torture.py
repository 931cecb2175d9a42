"""SIGKILL for encoders at 200 random moments: what was done stays, and nothing half-done is seen.

In every third round two encoders work on the same pages, and each is killed at its own moment.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import random
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
import pytest
import torture_encoder
from conftest import Pipeline
from PIL import Image

from pipeline.store import Compression, Store

pytestmark = pytest.mark.check

KILLS, BATCH, STEP = 200, 24, 6
LATEST_KILL_S = 0.05  # after the page that is waited for


@pytest.fixture
def pages(tmp_path: Path) -> list[Path]:
    """Small pages, no two alike."""
    directory = tmp_path / "pages"
    directory.mkdir()
    draw = np.random.default_rng(1)
    paths = [directory / f"{number:04d}.png" for number in range(BATCH + STEP * KILLS)]
    for path in paths:
        Image.fromarray(draw.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    return paths


@pytest.fixture
def zygote(monkeypatch: pytest.MonkeyPatch) -> multiprocessing.context.ForkServerContext:
    """Processes that have imported everything from the start."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torture_encoder"])
    return context


def test_200_kills_lose_no_finished_page_and_leave_nothing(
    tmp_path: Path,
    pages: list[Path],
    zygote: multiprocessing.context.ForkServerContext,
    pipeline: Pipeline,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cache, chance = tmp_path / "cache", random.Random(200)
    kept: dict[str, str] = {}
    kills = rounds = 0
    while kills < KILLS:
        batch = pages[STEP * rounds :][:BATCH]  # the first of them as earlier kills left them
        assert len(batch) == BATCH, "the encoders end before they are killed"
        encoders = []
        for number in range(2 if rounds % 3 == 2 else 1):
            reports = tmp_path / f"{rounds}-{number}.txt"
            order = chance.sample(batch, len(batch))
            words = (order, cache, reports, chance.choice(list(Compression)))
            encoders.append((zygote.Process(target=torture_encoder.encode, args=words), reports))
        for process, _ in encoders:
            process.start()
        for process, reports in encoders:
            kills += killed(process, reports, chance)
        for _, reports in encoders:
            check_done(cache, keys_in(reports), kept)
        rounds += 1
    left = list(cache.rglob("*.tmp"))
    with capsys.disabled():
        print(f"\n{kills} kills in {rounds} rounds, {len(kept)} pages done, {len(left)} files left")
    check_end(cache, len(left), kept, pipeline)
    assert len(left) >= KILLS // 20, "kills came in the middle of writes"
    assert len(kept) >= KILLS


def killed(process: ForkServerProcess, reports: Path, chance: random.Random) -> bool:
    """Kill an encoder some time after some page is done; False if it had ended by itself."""
    wanted, more_s = chance.randrange(BATCH // 2), chance.uniform(0, LATEST_KILL_S)
    until = time.monotonic() + 60
    while len(keys_in(reports)) < wanted and process.is_alive():
        assert time.monotonic() < until, "no page was done within a minute"
        time.sleep(0.001)
    time.sleep(more_s)
    process.kill()
    process.join()
    assert process.exitcode in (-9, 0), "an encoder failed"
    return process.exitcode == -9


def keys_in(reports: Path) -> list[str]:
    return reports.read_text().split() if reports.exists() else []


def check_done(cache: Path, keys: list[str], kept: dict[str, str]) -> None:
    """What is done is there; and what was before, unchanged."""
    for key in keys:
        (path,) = cache.glob(f"v1/*/{key[:2]}/{key}.parquet")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert kept.setdefault(key, digest) == digest, "a finished page was written again"


def check_end(cache: Path, left: int, kept: dict[str, str], pipeline: Pipeline) -> None:
    found = Store(cache, "").verify()
    assert {problem.why for problem in found} <= {"a temporary file that was left over"}
    assert len(found) == left
    repaired = json.loads(pipeline("cache", "repair", "--json", cwd=cache.parent).stdout)
    assert len(repaired["repaired"]) == left, repaired
    assert not list(cache.rglob("*.tmp")) and not (cache / "quarantine").exists()
    pipeline("cache", "verify", cwd=cache.parent)
    check_done(cache, list(kept), kept)
