"""No engine outlives its driver, however the driver dies."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from pipeline.engines import guard
from pipeline.engines.process import EngineProcess

# a child that guards itself, starts a grandchild in its group, and waits
CHILD = """
import subprocess, sys, time
from pipeline.engines import guard
guard.lead_group()
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(grandchild.pid, flush=True)
time.sleep(600)
"""
# the same, its grandchild guarded as vLLM's processes are by the plugin
CHILD_WITH_GUARDED_GRANDCHILD = CHILD.replace(
    "import time; time",
    "import time; from pipeline.engines import guard; "
    "guard.die_with_leader(); print('ready', flush=True); time",
)
DRIVER = """
import sys, time
from pathlib import Path
from pipeline.engines.process import EngineProcess
work = Path(sys.argv[1])
process = EngineProcess("guarded_child", [], {"PYTHONPATH": sys.argv[1], "PATH": ""},
    log=work / "log", record=work / "engine.json", events_variable="UNUSED_FD")
time.sleep(600)
"""


def wait_for(condition, timeout_s: float = 30.0) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "guarded_child.py").write_text(CHILD)
    return tmp_path


def grandchild_of(work: Path) -> psutil.Process:
    log = work / "log"
    assert wait_for(lambda: log.exists() and log.read_text().endswith("\n")), "child never started"
    return psutil.Process(int(log.read_text()))


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_killed_driver_takes_child_and_grandchild_along(work: Path) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(work)])
    grandchild = grandchild_of(work)
    child = grandchild.parent()
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert wait_for(lambda: is_gone(child) and is_gone(grandchild), 5.0)


def test_a_guarded_grandchild_goes_even_if_the_child_is_killed_with_the_driver(work: Path) -> None:
    (work / "guarded_child.py").write_text(CHILD_WITH_GUARDED_GRANDCHILD)
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(work)])
    log = work / "log"
    assert wait_for(lambda: log.exists() and "ready" in log.read_text())
    grandchild = psutil.Process(int(log.read_text().split()[0]))
    child = grandchild.parent()
    driver.send_signal(signal.SIGSTOP)  # so that it can't clean up
    child.send_signal(signal.SIGSTOP)
    driver.send_signal(signal.SIGKILL)
    child.send_signal(signal.SIGKILL)
    driver.wait()
    assert wait_for(lambda: is_gone(child) and is_gone(grandchild), 5.0)


def test_ending_a_process_ends_its_group(work: Path) -> None:
    environment = {"PYTHONPATH": str(work), "PATH": ""}
    with EngineProcess(
        "guarded_child",
        [],
        environment,
        log=work / "log",
        record=work / "engine.json",
        events_variable="UNUSED_FD",
    ):
        grandchild = grandchild_of(work)
        assert not is_gone(grandchild)
        assert (work / "engine.json").exists()
    assert wait_for(lambda: is_gone(grandchild), 5.0)
    assert not (work / "engine.json").exists()


def test_the_next_run_ends_what_a_dead_one_left(tmp_path: Path) -> None:
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (process,) = [p for p in guard.group_members(os.getpgrp()) if p.pid == left.pid]
    record = tmp_path / "engine.json"
    record.write_text(json.dumps([asdict(process)]))
    assert guard.end_leftovers(record) == 1
    assert left.wait(5) == -signal.SIGKILL
    assert guard.end_leftovers(record) == 0


def test_another_process_with_a_recorded_number_is_left_alone(tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        record = tmp_path / "engine.json"
        record.write_text(json.dumps([{"pid": bystander.pid, "start_ticks": 1}]))
        assert guard.end_leftovers(record) == 0
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"pid": 1}]', "{}"])
def test_an_unreadable_record_is_no_reason_to_stop(tmp_path: Path, text: str) -> None:
    record = tmp_path / "engine.json"
    record.write_text(text)
    assert guard.end_leftovers(record) == 0
