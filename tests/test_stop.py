"""Signals and time limits, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import sys, time
from pipeline.run.stop import Stop
limit, drain, phase, seconds = sys.argv[1:]
stop = Stop(float(limit) or None, drain_s=float(drain))
try:
    with stop.listening():
        if phase == "drain":
            with stop.draining():
                print("ready", flush=True)
                end = time.monotonic() + float(seconds)
                while time.monotonic() < end:
                    time.sleep(0.05)
                    if stop.asked() and seconds == "9":
                        break
        else:
            print("ready", flush=True)
            time.sleep(float(seconds))
    print("drained" if stop.asked() else "done", stop.reason)
except KeyboardInterrupt:
    print("cut", stop.reason)
"""


def run(
    *signals: int, limit_s: float = 0, drain_s: float = 30, phase: str = "drain", seconds: str = "9"
) -> str:
    words = [sys.executable, "-c", PROGRAM, str(limit_s), str(drain_s), phase, seconds]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        for number in signals:
            os.kill(process.pid, number)
        return process.communicate(timeout=60)[0].decode().strip()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_lets_what_is_in_flight_finish(number: int) -> None:
    assert run(number) == "drained signal"


def test_outside_the_engine_a_signal_stops_at_once() -> None:
    assert run(signal.SIGTERM, phase="encode", seconds="60") == "cut signal"


def test_what_does_not_finish_is_cut_off() -> None:
    assert run(signal.SIGTERM, drain_s=0.3, seconds="60") == "cut signal"


def test_time_that_is_up_is_a_request_to_stop() -> None:
    assert run(limit_s=0.3) == "drained time"
    assert run(limit_s=0.3, drain_s=0.3, seconds="60") == "cut time"
    assert run(limit_s=0.3, phase="encode", seconds="60") == "cut time"


def test_a_run_that_ends_in_time_is_not_stopped() -> None:
    assert run(limit_s=60, seconds="0.2") == "done"
