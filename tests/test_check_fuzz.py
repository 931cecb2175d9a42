"""2,000 damaged files through `pipeline pages`: no crash, no hang, bounded memory."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from conftest import COMMAND
from page_fuzz import MEMORY_LIMIT_BYTES, SECONDS_PER_FILE, fuzz, write_files

from pipeline.errors import Reason

pytestmark = pytest.mark.check
CASES = Path(__file__).parent / "cases"


@pytest.mark.parametrize("seed", [11, 12])
def test_2000_damaged_files_end_as_pages_or_reasons(tmp_path: Path, seed: int) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    write_files(directory, seed, 2000)
    words = [*COMMAND, "pages", directory, "--json", "--model", CASES / "qwen3_vl"]
    with open(tmp_path / "list.json", "wb") as stdout, open(tmp_path / "stderr", "wb") as stderr:
        child = subprocess.Popen(words, stdout=stdout, stderr=stderr)
        try:
            child.wait(timeout=600)
        except subprocess.TimeoutExpired:
            child.kill()
            raise
    assert child.returncode == 3, (tmp_path / "stderr").read_bytes()[-2000:]
    record = json.loads((tmp_path / "list.json").read_text())
    assert record["skipped"] == 0
    assert len({page["file"] for page in record["pages"]}) == 2000
    reasons = {page["reason"] for page in record["pages"]}
    assert None in reasons and reasons - {None} <= {reason.value for reason in Reason}


def test_each_of_2000_files_alone_is_quick_and_small(tmp_path: Path) -> None:
    done = fuzz(tmp_path, seed=13, count=2000)  # ends where one file takes too long
    assert SECONDS_PER_FILE <= 20 and done.peak_bytes < MEMORY_LIMIT_BYTES
    assert all(done.outcomes)
