"""Does memory grow with the job? Peak of every process for a long job and a short one.

Runs both jobs over the same rendered pages, each in a run directory of its own, and reads each
process's high-water mark (VmHWM, proc(5)) until it ends, and the peak of what all of them take
together (PSS, memory that they share counted once). A request has an embedding of 2 MB: pages of
2.8 megapixels, a different prompt for each request. Says, too, how many bytes the run wrote per
request. Needs Linux and a free core. The last line is JSON: the ratio (long to short) per process
and for all together.
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
ALL = "all together"


PIXELS = ["--min-pixels", "2700000", "--max-pixels", "2800000"]
PAGES = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="llm", choices=["llm", "run-batch"])
    parser.add_argument("--long", type=int, default=2000, metavar="REQUESTS")
    parser.add_argument("--short", type=int, default=200, metavar="REQUESTS")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        lines = make_job(work, options.long)
        counts = (options.short, options.long)
        peaks = {count: peaks_of(work, lines[:count], options.engine) for count in counts}
    print(f"{'process':<16}" + "".join(f"{count:>10} requests" for count in counts) + "   ratio")
    ratios = {}
    for role in (*ROLES, ALL):
        small, large = (peaks[count].get(role, 0) for count in counts)
        ratios[role] = round(large / small, 3) if small else None
        print(f"{role:<16}{small / 2**20:>15.0f} MiB{large / 2**20:>15.0f} MiB{ratios[role]!s:>8}")
    print(json.dumps({"engine": options.engine, "requests": counts, "ratio": ratios}))


def make_job(work: Path, count: int) -> list[str]:
    """Render, encode, and write a job with many lines per page, no two of them alike."""
    render = [sys.executable, ROOT / "tools" / "render_pages.py", "--seed", "77"]
    subprocess.run([*render, "--count", str(PAGES), "--out", work / "pages"], check=True)
    words = ["encode", "pages", "--job", "job.jsonl", "--prompt", "Read the page.", *PIXELS]
    subprocess.run([*PIPELINE, *words, "--max-tokens", "8", "--quiet"], cwd=work, check=True)
    records = [json.loads(line) for line in (work / "job.jsonl").read_text().splitlines()]
    lines = []
    for number in range(count):
        record = json.loads(json.dumps(records[number % PAGES]))
        record["custom_id"] = f"request {number}"
        record["body"]["messages"][0]["content"][0] = {"type": "text", "text": f"Read {number}."}
        lines.append(json.dumps(record) + "\n")
    return lines


def peaks_of(work: Path, lines: list[str], engine: str) -> dict[str, int]:
    """Run the lines as a job; bytes at the high-water mark of each role, and of all together."""
    job = work / f"job-{len(lines)}.jsonl"
    job.write_text("".join(lines))
    words = ["run", job.name, "--dtype", "float32", "--engine", engine, "--retries", "0", *PIXELS]
    driver = subprocess.Popen([*PIPELINE, *words, "--quiet"], cwd=work)
    peaks: dict[str, int] = {}
    while driver.poll() is None:
        together = 0
        for process in [psutil.Process(driver.pid), *children_of(driver.pid)]:
            together += share_of(process.pid)
            role, peak = role_of(process, driver.pid), high_water_mark(process.pid)
            if role is not None:
                peaks[role] = max(peaks.get(role, 0), peak)
        peaks[ALL] = max(peaks.get(ALL, 0), together)
        time.sleep(0.3)
    if driver.returncode != 0:
        raise SystemExit(f"the job of {len(lines)} requests ended with {driver.returncode}")
    written = sum(path.stat().st_size for path in job.with_suffix(".run").rglob("*"))
    print(f"{len(lines)} requests: {written / len(lines):.0f} bytes written for each")
    return peaks


def share_of(pid: int) -> int:
    """Proportional set size of a process in bytes; 0 if it is gone."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next(int(line.split()[1]) << 10 for line in rollup.splitlines() if "Pss:" in line)


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
