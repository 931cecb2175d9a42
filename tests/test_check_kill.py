"""SIGKILL ten times over one job with long answers: nothing is left behind, nothing is lost.

Half of the kills take the whole process group, half the driver alone; most come between two
results, some while the engine starts. `make check PART=kill` prints one line per kill.
"""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from conftest import COMMAND, Pipeline, is_alive, results_of

pytestmark = [pytest.mark.check, pytest.mark.engine]

REQUESTS, KILLS, EARLY_KILLS = 200, 10, 2
TOKENS = 150


@pytest.fixture
def job(tmp_path: Path, pipeline: Pipeline, render) -> Path:
    """200 requests whose answers are 150 tokens long, on pages that are encoded."""
    render(4, REQUESTS).rename(tmp_path / "pages")
    words = ["--job", "job.jsonl", "--prompt", "Read the page.", "--max-tokens", TOKENS]
    pipeline("encode", "pages", *words, cwd=tmp_path)
    path = tmp_path / "job.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record["body"]["min_tokens"] = TOKENS
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_ten_kills_lose_nothing_and_leave_nothing(
    job: Path, pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(10)
    midway = 0
    for number in range(KILLS):
        whole_group = number % 2 == 0
        before = count_results(job)
        # leave enough for the kills that are still to come
        step = chance.randint(1, max(1, (REQUESTS - 20 - before) // (KILLS - number)))
        early = number in (3, 7)[:EARLY_KILLS]
        driver = start(job)
        if early:
            time.sleep(chance.uniform(2, 12))
        else:
            wait_for_results(job, before + step, driver)
        family = psutil.Process(driver.pid).children(recursive=True)
        kill(driver, whole_group)
        at_kill = count_results(job)
        midway += before < at_kill < REQUESTS
        time.sleep(5)
        left = [process for process in family if is_alive(process)]
        with capsys.disabled():
            print(
                f"\nkill {number + 1}: {'group' if whole_group else 'driver'}, "
                f"{before} → {at_kill} results on disk, {len(family)} processes, {len(left)} left",
                end="",
            )
        assert left == []
    assert midway >= 6
    words = ["run", job.name, "--dtype", "float32", "--json"]
    report = json.loads(pipeline(*words, cwd=job.parent).stdout)
    assert report["reused"] + report["succeeded"] == REQUESTS
    assert len(results_of(job)) == REQUESTS, "and results_of fails on a custom_id that is twice"
    with capsys.disabled():
        print(f"\nlast run: {report}")


def start(job: Path) -> subprocess.Popen[bytes]:
    words = ["run", job.name, "--dtype", "float32", "--max-num-seqs", "4", "--quiet"]
    return subprocess.Popen([*COMMAND, *words], cwd=job.parent, start_new_session=True)


def kill(driver: subprocess.Popen[bytes], whole_group: bool) -> None:
    if whole_group:
        os.killpg(driver.pid, signal.SIGKILL)
    else:
        os.kill(driver.pid, signal.SIGKILL)
    driver.wait()


def count_results(job: Path) -> int:
    path = job.with_suffix(".run") / "results.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_results(job: Path, count: int, driver: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 300
    while count_results(job) < count:
        assert driver.poll() is None, f"the run ended with {driver.returncode}"
        assert time.monotonic() < end, "no results came"
        time.sleep(0.01)
