"""Does memory grow with the job? Peak of every process for a 200-request and a 50-request job.

Runs both jobs over the same rendered pages, each in a run directory of its own, and reads each
process's high-water mark (VmHWM, proc(5)) until it ends. Needs Linux and a free core; about four
minutes. The last line is JSON: the ratio (200 to 50) per process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
PIPELINE = [sys.executable, "-m", "pipeline"]
ROLES = ("driver", "vLLM front end", "engine core", "worker")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="llm", choices=["llm", "run-batch"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        lines = make_job(work, 200)
        peaks = {count: peaks_of(work, lines[:count], options.engine) for count in (50, 200)}
    print(f"{'process':<16}{'50 requests':>14}{'200 requests':>14}{'ratio':>8}")
    ratios = {}
    for role in ROLES:
        small, large = peaks[50].get(role, 0), peaks[200].get(role, 0)
        ratios[role] = round(large / small, 3) if small else None
        print(f"{role:<16}{small / 2**20:>11.0f} MiB{large / 2**20:>11.0f} MiB{ratios[role]!s:>8}")
    print(json.dumps({"engine": options.engine, "ratio_200_to_50": ratios}))


def make_job(work: Path, count: int) -> list[str]:
    """Render, encode, and write a job with one line per page."""
    render = [sys.executable, ROOT / "tools" / "render_pages.py", "--seed", "77"]
    subprocess.run([*render, "--count", str(count), "--out", work / "pages"], check=True)
    words = ["encode", "pages", "--job", "job.jsonl", "--prompt", "Read the page.", "--quiet"]
    subprocess.run([*PIPELINE, *words], cwd=work, check=True)
    return (work / "job.jsonl").read_text().splitlines(keepends=True)


def peaks_of(work: Path, lines: list[str], engine: str) -> dict[str, int]:
    """Run the lines as a job; bytes at the high-water mark of each role."""
    job = work / f"job-{len(lines)}.jsonl"
    job.write_text("".join(lines))
    words = ["run", job.name, "--dtype", "float32", "--engine", engine, "--quiet"]
    driver = subprocess.Popen([*PIPELINE, *words], cwd=work)
    peaks: dict[str, int] = {}
    while driver.poll() is None:
        for process in [psutil.Process(driver.pid), *children_of(driver.pid)]:
            role, peak = role_of(process, driver.pid), high_water_mark(process.pid)
            if role is not None:
                peaks[role] = max(peaks.get(role, 0), peak)
        time.sleep(0.1)
    if driver.returncode != 0:
        raise SystemExit(f"the job of {len(lines)} requests ended with {driver.returncode}")
    return peaks


def children_of(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def role_of(process: psutil.Process, driver: int) -> str | None:
    """Which of ROLES a process is; None for the interpreter's own helpers."""
    if process.pid == driver:
        return "driver"
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return None
    for mark, role in (
        ("pipeline.engines.", "vLLM front end"),
        ("EngineCore", "engine core"),
        ("Worker", "worker"),
    ):
        if mark in words:
            return role
    return None


def high_water_mark(pid: int) -> int:
    """Peak resident bytes of a process so far; 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
