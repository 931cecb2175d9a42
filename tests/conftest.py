"""The command as people call it, and rendered pages whose text is known."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # each worker has cores of its own, and so have the engines that it starts: two of them with
    # threads on all cores hold each other up many times over
    _number, _count = int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    if _cores := sorted(os.sched_getaffinity(0))[_number::_count]:
        os.sched_setaffinity(0, _cores)

# what tests remember of files is no business of the user's
_memo = tempfile.TemporaryDirectory(prefix="pipeline-memo-")
os.environ["PIPELINE_MEMO"] = str(Path(_memo.name) / "memo.sqlite")

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "pipeline"]

Pipeline = Callable[..., subprocess.CompletedProcess[str]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start engines come first: they take longest, and two workers share them."""
    starting = {item.path for item in items if item.get_closest_marker("engine")}
    items.sort(key=lambda item: item.path not in starting)


@pytest.fixture(scope="session")
def pipeline() -> Pipeline:
    """`pipeline(*words, cwd=DIR, code=0)` runs the command and checks its exit code."""

    def call(
        *words: object, cwd: Path, code: int | None = 0, timeout_s: float = 600
    ) -> subprocess.CompletedProcess[str]:
        environment = {name: text for name, text in os.environ.items() if "PIPELINE" not in name}
        environment["PIPELINE_MEMO"] = os.environ["PIPELINE_MEMO"]
        done = subprocess.run(
            [*COMMAND, *map(str, words)],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert code is None or done.returncode == code, done.stderr[-4000:] + done.stdout[-1000:]
        return done

    return call


@pytest.fixture(scope="session")
def render(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`render(seed, count, *options)` gives a directory of pages with its truth.tsv."""

    def call(seed: int, count: int, *options: str) -> Path:
        out = tmp_path_factory.mktemp(f"pages-{seed}")
        tool = [sys.executable, str(ROOT / "tools" / "render_pages.py"), "--seed", str(seed)]
        words = ["--count", str(count), "--out", str(out), *options]
        subprocess.run([*tool, *words], check=True, capture_output=True)
        return out

    return call


def truth_of(directory: Path) -> dict[str, str]:
    """File name → text, from truth.tsv."""
    lines = (directory / "truth.tsv").read_text(encoding="utf-8").splitlines()
    return {name: text.replace("\\n", "\n") for name, text in (line.split("\t") for line in lines)}


def results_of(job: Path) -> dict[str, dict]:
    """custom_id → result line; fails if a custom_id stands there twice."""
    lines = (job.with_suffix(".run") / "results.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    by_name = {record["custom_id"]: record for record in records}
    assert len(by_name) == len(records), "a custom_id stands twice in results.jsonl"
    return by_name


def texts_of(job: Path) -> dict[str, str]:
    """custom_id → the text of the answer."""
    return {
        name: record["response"]["body"]["choices"][0]["message"]["content"]
        for name, record in results_of(job).items()
    }


def accuracy(texts: dict[str, str], truth: dict[str, str]) -> float:
    """1 − edit distance / length, summed over all pages of `truth`."""
    errors = sum(edit_distance(texts.get(name, ""), text) for name, text in truth.items())
    return 1 - errors / sum(len(text) for text in truth.values())


def edit_distance(first: str, second: str) -> int:
    """Levenshtein distance."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, start=1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(second, start=1):
            diagonal, row[j] = row[j], min(diagonal + (a != b), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def is_alive(process: psutil.Process) -> bool:
    """False for a zombie, too."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
