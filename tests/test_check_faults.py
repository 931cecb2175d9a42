"""Faults while a job runs on the real vLLM: nothing lost, nothing doubled, the right exit code.

`make check PART=faults`. Each test is one fault; `tests/test_faults.py` has some of them together.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import COMMAND, Pipeline, texts_of

pytestmark = [pytest.mark.check, pytest.mark.engine]

REQUESTS, TOKENS, SEQUENCES = 50, 40, 4
IN_FLIGHT = 2 * SEQUENCES  # twice what the engine runs at once: the next ones are rendered
RUN = ["run", "job.jsonl", "--dtype", "float32", "--max-num-seqs", SEQUENCES, "--json"]
FAULTY = ["--engine-arg", "logits-processors=fault_processor:FaultProcessor"]


@pytest.fixture(autouse=True)
def tests_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory, pipeline: Pipeline, render: Any) -> Path:
    """Fifty pages, encoded, their job, and the undisturbed answers to it in `undisturbed/`."""
    directory = tmp_path_factory.mktemp("faults")
    render(77, REQUESTS).rename(directory / "pages")
    words = ["--job", "job.jsonl", "--prompt", "Read the page.", "--max-tokens", TOKENS]
    pipeline("encode", "pages", *words, cwd=directory)
    pipeline(*RUN, "--retries", 0, cwd=directory)
    assert len(texts_of(directory / "job.jsonl")) == REQUESTS
    (directory / "job.run").rename(directory / "undisturbed.run")
    return directory


@pytest.fixture
def work(encoded: Path) -> Iterator[Path]:
    """The same directory with the job as it was, and no run of it."""
    whole = (encoded / "job.jsonl").read_bytes()
    yield encoded
    (encoded / "job.jsonl").write_bytes(whole)
    if (encoded / "job.run").exists():
        (encoded / "job.run").rename(encoded / f"old-{time.time_ns()}.run")


def with_fault(work: Path, number: int, **arguments: Any) -> str:
    """Give one line of the job a fault; returns its custom_id."""
    lines = (work / "job.jsonl").read_text().splitlines()
    record = json.loads(lines[number])
    record["body"]["vllm_xargs"] = arguments
    lines[number] = json.dumps(record)
    (work / "job.jsonl").write_text("\n".join(lines) + "\n")
    return str(record["custom_id"])


def assert_whole(work: Path, *, without: tuple[str, ...] = ()) -> None:
    """Every answer is there once, word for word as undisturbed."""
    expected = texts_of(work / "undisturbed.jsonl")
    for name in without:
        del expected[name]
    assert texts_of(work / "job.jsonl") == expected


def totals(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout)
    parts = ("succeeded", "reused", "failed", "expired")
    assert found["requests"] == sum(found[part] for part in parts) == REQUESTS
    return found


class Running:
    """`pipeline run` in the background."""

    def __init__(self, work: Path, *words: object) -> None:
        self.work = work
        command = [*COMMAND, *map(str, [*RUN, "--retries", 0, *words])]
        self.process = subprocess.Popen(
            command,
            cwd=work,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # a shell that starts tests in the background has SIGINT ignored
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def wait_for_results(self, count: int) -> int:
        """Return once so many answers are on disk, and how many there are then."""
        end = time.monotonic() + 300
        path = self.work / "job.run" / "results.jsonl"
        while True:
            found = path.read_bytes().count(b"\n") if path.exists() else 0
            if found >= count:
                return found
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < end, "no results came"
            time.sleep(0.02)

    def child(self, title: str) -> psutil.Process:
        """The process of the engine whose command line holds `title`."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        return next(each for each in family if title in " ".join(each.cmdline()))

    def end(self, code: int) -> dict[str, Any]:
        out, err = self.process.communicate(timeout=600)
        assert self.process.returncode == code, err[-4000:]
        self.err = err
        return totals(subprocess.CompletedProcess([], code, out, err))


@pytest.mark.parametrize("title", ["EngineCore", "VLLM::Worker", "pipeline.engines.child"])
def test_a_killed_part_of_the_engine_is_started_again(work: Path, title: str) -> None:
    run = Running(work)
    before = run.wait_for_results(10)
    run.child(title).kill()
    report = run.end(code=0)
    assert before < REQUESTS - SEQUENCES, "it was in the middle"
    assert (report["succeeded"], report["engine_starts"]) == (REQUESTS, 2)
    assert_whole(work)


def test_a_killed_driver_loses_nothing(work: Path, pipeline: Pipeline) -> None:
    run = Running(work)
    before = run.wait_for_results(10)
    run.process.kill()
    run.process.wait()
    report = totals(pipeline(*RUN, "--retries", 0, cwd=work))
    assert report["reused"] >= before and report["succeeded"] == REQUESTS - report["reused"]
    assert_whole(work)


def test_a_request_that_kills_the_engine_is_found_and_set_aside(
    work: Path, pipeline: Pipeline
) -> None:
    poison = with_fault(work, 23, fault="die")
    report = totals(pipeline(*RUN, *FAULTY, "--retries", 0, cwd=work, code=3))
    assert (report["succeeded"], report["failed"]) == (REQUESTS - 1, 1)
    restarts = report["engine_starts"] - 1
    assert restarts <= math.ceil(math.log2(IN_FLIGHT)) + 2, restarts
    (error,) = (work / "job.run" / "errors.jsonl").read_text().splitlines()
    assert json.loads(error)["custom_id"] == poison
    assert json.loads(error)["reason"] == "engine_death"
    assert_whole(work, without=(poison,))
    again = totals(pipeline(*RUN, *FAULTY, "--retries", 0, cwd=work, code=3))
    assert (again["engine_starts"], again["reused"], again["failed"]) == (0, REQUESTS - 1, 1)


def test_an_engine_that_hangs_is_noticed(work: Path, pipeline: Pipeline) -> None:
    name = with_fault(work, 23, fault="hang", once=str(work / f"hung-{time.time_ns()}"))
    words = [*RUN, *FAULTY, "--stall-timeout", 10, "--retries", 0]
    done = pipeline(*words, cwd=work)
    report = totals(done)
    assert (report["succeeded"], report["engine_starts"]) == (REQUESTS, 2)
    assert "the engine made no step within 10 s" in done.stderr
    assert name in texts_of(work / "job.jsonl")
    assert_whole(work)


def test_a_start_that_fails_twice_then_succeeds(
    work: Path, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "starts").write_text("2")
    monkeypatch.setenv("FAULT_AT_START", str(work / "starts"))
    done = pipeline(*RUN, *FAULTY, "--retries", 0, cwd=work)
    assert totals(done)["succeeded"] == REQUESTS
    assert done.stderr.count("engine died: RuntimeError: this start was to fail") == 2
    assert_whole(work)


def test_an_engine_short_of_memory_is_started_with_less(work: Path, pipeline: Pipeline) -> None:
    with_fault(work, 23, fault="memory", once=str(work / f"short-{time.time_ns()}"))
    done = pipeline(*RUN, *FAULTY, "--kv-cache-gib", 2, "--retries", 0, cwd=work)
    assert totals(done)["succeeded"] == REQUESTS
    assert "can't allocate memory" in done.stderr and "next with --kv-cache-gib 1" in done.stderr
    assert_whole(work)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")
def test_a_full_disk_stops_the_run_and_costs_nothing(work: Path, pipeline: Pipeline) -> None:
    place = work / "job.run"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], check=True)
    try:
        run = Running(work)
        run.wait_for_results(5)
        with (place / "filler").open("wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(b"x" * 512)
            except OSError:
                pass
        err = run.process.communicate(timeout=600)[1]
        assert run.process.returncode == 1, err
        assert "No space left on device" in err and "hint: free space there" in err
        (place / "filler").unlink()
        report = totals(pipeline(*RUN, "--retries", 0, cwd=work))
        assert report["reused"] >= 5
        assert_whole(work)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_the_next_run_goes_on(
    work: Path, pipeline: Pipeline, number: int
) -> None:
    run = Running(work)
    before = run.wait_for_results(5)
    run.process.send_signal(number)
    report = run.end(code=4)
    assert before <= report["succeeded"] < REQUESTS and report["failed"] == 0
    assert "stopped by a signal" in run.err
    again = totals(pipeline(*RUN, "--retries", 0, cwd=work))
    assert again["reused"] == report["succeeded"]
    assert_whole(work)


def test_a_time_limit_leaves_the_rest_for_the_next_run(work: Path, pipeline: Pipeline) -> None:
    run = Running(work, "--max-hours", 18 / 3600)
    report = run.end(code=4)
    assert report["expired"] > 0 and "time is up" in run.err
    totals(pipeline(*RUN, "--retries", 0, cwd=work))
    assert_whole(work)


CLOCK = """
import runpy, sys, time
real, calls = time.time, [0]
def jumping():
    calls[0] += 1
    return real() + (-86400 if calls[0] % 2 else 86400)  # a day back, a day ahead
time.time = jumping
shown = time.strftime
time.strftime = lambda form, *given: shown(form, *(given or (time.localtime(jumping()),)))
sys.argv = ["pipeline", *sys.argv[1:]]
runpy.run_module("pipeline", run_name="__main__", alter_sys=True)
"""


def test_a_clock_that_jumps_does_no_harm(work: Path) -> None:
    words = [sys.executable, "-c", CLOCK, *map(str, [*RUN, "--retries", 0, "--max-hours", 1])]
    done = subprocess.run(words, cwd=work, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert totals(done)["succeeded"] == REQUESTS
    assert_whole(work)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two engines want two cores")
def test_two_engines_share_a_job_and_one_of_them_dies(work: Path) -> None:
    run = Running(work, "--replicas", 2)
    run.wait_for_results(10)
    run.child("EngineCore").kill()
    report = run.end(code=0)
    assert report["succeeded"] == REQUESTS and report["engine_starts"] == 3
    assert_whole(work)
