"""A real file system without room, or without inodes: a clear stop, and a rerun that completes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import make_qwen3_vl
from PIL import Image

PAGES = 40
STUB = Path(__file__).with_name("encoder_with_stub_tower.py")

# A mount of its own, seen by this script alone: DIRECTORY OPTIONS FILLER ENCODE…
SCRIPT = """
directory=$1 options=$2 filler=$3; shift 3
mount -t tmpfs -o "$options" tmpfs "$directory" || exit 99
eval "$filler"
"$@" > "$directory.1.out" 2> "$directory.1.err"; echo $? > "$directory.1.code"
find "$directory" -type f > "$directory.files"
PIPELINE cache verify --cache "$directory/cache" --json > "$directory.verify"
rm -r "$directory"/filler
"$@" > "$directory.2.out" 2> "$directory.2.err"; echo $? > "$directory.2.code"
PIPELINE cache verify --cache "$directory/cache" --json >> "$directory.verify"
"""


def _namespace() -> list[str] | None:
    """How to get mounts of one's own here, None if there is no way."""
    for words in (["unshare", "-m"], ["unshare", "-Urm"]):
        test = [*words, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        try:
            if subprocess.run(test, capture_output=True).returncode == 0:
                return words
        except OSError:
            break
    return None


@pytest.fixture(scope="module")
def namespace() -> list[str]:
    words = _namespace()
    if words is None:
        pytest.skip("no tmpfs can be mounted here")
    return words


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3_vl(tmp_path_factory.mktemp("full") / "model")


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    directory = tmp_path / "docs"
    directory.mkdir()
    for number in range(PAGES):
        values = np.random.default_rng(number).integers(0, 256, (320, 320, 3), dtype=np.uint8)
        Image.fromarray(values).save(directory / f"{number:02}.png")
    return directory


@pytest.mark.parametrize(
    ("options", "filler", "message"),
    [
        (
            "size=4m",
            'head -c 3700000 /dev/zero > "$directory/filler"',
            "No space left on device (",
        ),
        (
            "size=40m,nr_inodes=400",
            'mkdir "$directory/filler"; for n in $(seq 300); do : > "$directory/filler/$n"; done',
            "no inode free",
        ),
    ],
    ids=["bytes", "inodes"],
)
def test_a_full_disk_is_a_clear_stop_and_after_it_the_rerun_completes(
    tmp_path: Path,
    docs: Path,
    model: Path,
    namespace: list[str],
    options: str,
    filler: str,
    message: str,
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    encode = [sys.executable, STUB, "0", tmp_path / "log", "encode", docs, "--json"]
    encode += ["--cache", disk / "cache", "--model", model, "--threads", "1"]
    script = SCRIPT.replace("PIPELINE", f"{sys.executable} -m pipeline")
    words = [*namespace, "sh", "-c", script, "sh", disk, options, filler, *encode]
    subprocess.run(list(map(str, words)), check=True, timeout=120)

    said = (tmp_path / "disk.1.err").read_text()
    assert (tmp_path / "disk.1.code").read_text().strip() == "1", said
    assert message in said and " bytes needed" in said and f"`{disk}/cache/v1/" in said
    assert "hint: free some space or choose another directory with `--cache DIR`" in said
    assert "Traceback" not in said
    there = [Path(name) for name in (tmp_path / "disk.files").read_text().splitlines()]
    finished = [path for path in there if path.suffix == ".parquet"]
    assert 0 < len(finished) < PAGES, "the disk was full in the middle"
    assert not [path for path in there if path.suffix == ".tmp"]

    assert (tmp_path / "disk.2.code").read_text().strip() == "0"
    report = json.loads((tmp_path / "disk.2.out").read_text())
    assert (report["pages"], report["failed"]) == (PAGES, 0)
    assert report["cached"] == len(finished) and report["encoded"] == PAGES - len(finished)
    for verified in map(json.loads, (tmp_path / "disk.verify").read_text().splitlines()):
        assert verified["problems"] == []
