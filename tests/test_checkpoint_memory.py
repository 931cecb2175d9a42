"""Only the files with vision tensors are opened, and the tower is what its loading costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

LOAD = """
import ctypes, json, sys
import torch
from pipeline.checkpoint import resolve_model, vision_tensors

class Layout:
    def weight_name(self, name): return name.removeprefix("visual.") if "visual" in name else None
    def expected_shapes(self, config): return None
    def vision_config(self, config): return {}

def status(key):
    lines = [line.split() for line in open("/proc/self/status") if line.startswith(key)]
    return int(lines[0][1]) * 1024

torch.set_num_threads(1)
def load(directory, dtype):
    ctypes.CDLL(None).malloc_trim(0)  # what the one before had goes back first
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts from here
    before = status("VmRSS")
    tensors = vision_tensors(resolve_model(directory), Layout(), getattr(torch, dtype))
    size = sum(tensor.nbytes for tensor in tensors.values())
    return size, status("VmHWM") - before

load(*sys.argv[1:3])  # loads the kernels
print(json.dumps([load(*case) for case in zip(sys.argv[1::2], sys.argv[2::2])]))
"""


def write_tower(directory: Path, dtype: str, width_bytes: int) -> None:
    """Forty matrices of 1,024 × 1,024 zeros as holes, and two large ones; FP8 with scales."""
    shapes = {f"visual.{number}.weight": [1024, 1024] for number in range(40)}
    shapes |= {f"visual.large{number}.weight": [8192, 1024] for number in range(2)}
    entries = {name: (dtype, shape, width_bytes) for name, shape in shapes.items()}
    if dtype.startswith("F8"):
        scales = {f"{name}_scale": ("F32", [shape[0], 1], 4) for name, shape in shapes.items()}
        entries |= scales
    header, end = {}, 0
    for name, (kind, shape, each) in entries.items():
        start, end = end, end + shape[0] * shape[1] * each
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(directory / "model.safetensors", "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    (directory / "config.json").write_text("{}")


CASES = [("F32", 4, "float32"), ("BF16", 2, "float32"), ("F8_E4M3", 1, "float32"),
         ("F32", 4, "bfloat16")]  # fmt: skip


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Of each case the bytes of the tower, and the most that loading it added to memory."""
    words = []
    for stored, width_bytes, asked in CASES:
        directory = tmp_path_factory.mktemp(stored)
        write_tower(directory, stored, width_bytes)
        words += [str(directory), asked]
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *words], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "case", range(len(CASES)), ids=lambda number: "-".join(map(str, CASES[number]))
)
def test_loading_takes_a_fifth_more_than_the_tower_at_most(
    taken: list[list[int]], case: int
) -> None:
    size, most = taken[case]
    assert size == (40 + 16) * 2**20 * (4 if CASES[case][2] == "float32" else 2)
    assert 0.9 * size < most <= 1.2 * size


def test_encoding_opens_config_index_and_the_shards_of_the_tower(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "checkpoint_memory.py"
    words = ["--gib", "1", "--shards", "5", "--width", "64", "--depth", "2"]
    done = subprocess.run(
        [sys.executable, script, *words], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    result = json.loads(done.stdout.splitlines()[-1])
    shards = ["model-00002-of-00005.safetensors", "model-00003-of-00005.safetensors"]
    assert result["vision_shards"] == shards
    small = {"config.json", "model.safetensors.index.json", "preprocessor_config.json"}
    assert set(result["opened"]) == {*small, *shards}
    assert result["checkpoint_bytes"] > 0.99 * 2**30
    assert result["peak_bytes"] < result["limit_bytes"]
