"""What does it take to encode from a large checkpoint? Peak memory, and the files that are opened.

Makes a checkpoint of 20 GB in 10 shards whose text is holes in sparse files and whose tower is
real, split over two shards; encodes one page from it with the `pipeline` command. The kernel
(inotify, Linux) tells which files of the directory were opened, by whatever library. Needs as
much disk as the tower has bytes; the bound is the tower in float32, as it computes, and 1 GiB,
of which Python with torch takes most: a page of more pixels needs more. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.checkpoint import resolve_model
from pipeline.families import family_of
from pipeline.models import BUNDLED_PATH

ROOT = Path(__file__).parents[1]
PREFIX = "model.visual."
SLACK_BYTES = 1 << 30
IN_OPEN, IN_ISDIR = 0x20, 0x40000000  # inotify(7)
# the command, and its high-water mark (proc(5)) as its last line on stderr
ENCODE = """
import atexit, sys
from pipeline.cli import main
def peak():
    marks = [line.split() for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print(int(marks[0][1]) * 1024, file=sys.stderr)
atexit.register(peak)
main(sys.argv[1:])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=20, help="size of the checkpoint")
    parser.add_argument("--shards", type=int, default=10)
    parser.add_argument("--width", type=int, default=1024, help="hidden size of the tower")
    parser.add_argument("--depth", type=int, default=12, help="layers of the tower")
    parser.add_argument("--pixels", type=int, default=200_000, help="of the page, at the model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        tower = make_checkpoint(work / "large", options)
        with watched(work / "large") as opened:
            peak = encode(work, options.pixels)
        result = {
            "checkpoint_bytes": sum(path.stat().st_size for path in (work / "large").iterdir()),
            "tower_bytes_stored": tower.values * 2,
            "tower_bytes_float32": tower.values * 4,
            "peak_bytes": peak,
            "limit_bytes": tower.values * 4 + SLACK_BYTES,
            "vision_shards": sorted(tower.shards),
            "opened": sorted(opened),
        }
    for name, value in result.items():
        is_size = name.endswith(("_bytes", "_stored", "_float32"))
        print(f"{name:<22}{f'{value / 2**20:,.0f} MiB' if is_size else ', '.join(value)}")
    print(json.dumps(result))


# ---------------------------------------------------------------- checkpoint


@dataclass
class Shard:
    """A file to be: header, and where the data of its vision tensors goes."""

    header: dict[str, dict[str, object]] = field(default_factory=dict)
    size: int = 0

    def add(self, name: str, shape: tuple[int, ...]) -> None:
        stop = self.size + prod(shape) * 2
        self.header[name] = {
            "dtype": "BF16",
            "shape": list(shape),
            "data_offsets": [self.size, stop],
        }
        self.size = stop


@dataclass
class MadeTower:
    """What was made: values of the tower, and the shards that hold some."""

    values: int
    shards: set[str]


def make_checkpoint(directory: Path, options: argparse.Namespace) -> MadeTower:
    """The bundled reader with a wider tower, on the two middle shards; text as holes."""
    directory.mkdir()
    for path in BUNDLED_PATH.iterdir():
        if path.suffix in {".json", ".jinja"} and "safetensors" not in path.name:
            shutil.copy(path, directory / path.name)
    config = json.loads((directory / "config.json").read_text())
    config["vision_config"] |= {
        "hidden_size": options.width,
        "intermediate_size": options.width * 4,
        "depth": options.depth,
        "num_heads": max(1, options.width // 64),
    }
    (directory / "config.json").write_text(json.dumps(config))
    model = resolve_model(str(directory))
    shapes = family_of(model).expected_shapes(model.config)
    names = [
        f"model-{n + 1:05d}-of-{options.shards:05d}.safetensors" for n in range(options.shards)
    ]
    shards = {name: Shard() for name in names}
    middle = [names[options.shards // 2 - 1], names[options.shards // 2]]
    for number, (name, shape) in enumerate(shapes.items()):
        shards[middle[number % 2]].add(PREFIX + name, shape)
    text_bytes = int(options.gib * 2**30) // options.shards
    for number, shard in enumerate(shards.values()):
        for part in range(4):
            rows = max(1, (text_bytes - shard.size) // (4 - part) // 2 // 4096)
            name = f"model.language_model.layers.{number * 4 + part}.mlp.down_proj.weight"
            shard.add(name, (rows, 4096))
    for name, shard in shards.items():
        write(directory / name, shard)
    weight_map = {tensor: name for name, shard in shards.items() for tensor in shard.header}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return MadeTower(sum(map(prod, shapes.values())), set(middle))


def write(path: Path, shard: Shard) -> None:
    """A safetensors file: real numbers for the tower, holes for the rest."""
    random = np.random.default_rng(0)
    header = json.dumps(shard.header).encode()
    start = 8 + len(header)
    with open(path, "wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(start + shard.size)
        for name, entry in shard.header.items():
            if name.startswith(PREFIX):
                stream.seek(start + entry["data_offsets"][0])
                stream.write(weights(entry["shape"], random).data)


def weights(shape: list[int], random: np.random.Generator) -> NDArray[np.uint16]:
    """Matrices of unit gain, vectors of ones; flat, as bfloat16 (the upper half of float32)."""
    values = np.ones(shape, np.float32)
    if len(shape) > 1:
        values = random.standard_normal(prod(shape), np.float32) * prod(shape[1:]) ** -0.5
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


# ---------------------------------------------------------------- encoding, watched


def encode(work: Path, pixels: int) -> int:
    """Encode one sample page; bytes at the high-water mark of the command's process."""
    page = ROOT / "docs" / "invoice.png"
    budget = ["--min-pixels", str(pixels * 9 // 10), "--max-pixels", str(pixels)]
    words = ["encode", str(page), "--model", "large", *budget, "--quiet"]
    done = subprocess.run(
        [sys.executable, "-c", ENCODE, *words], cwd=work, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"the encoder ended with {done.returncode}:\n{done.stderr}")
    return int(done.stderr.splitlines()[-1])


class watched:
    """Names of the files of a directory that anyone opens meanwhile."""

    def __init__(self, directory: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK)
        if self._libc.inotify_add_watch(self._descriptor, os.fsencode(directory), IN_OPEN) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch")
        self._opened: set[str] = set()

    def __enter__(self) -> set[str]:
        return self._opened

    def __exit__(self, *_: object) -> None:
        self._opened |= set(self._events())
        os.close(self._descriptor)

    def _events(self) -> Iterator[str]:
        while True:
            try:
                data = os.read(self._descriptor, 1 << 16)
            except BlockingIOError:
                return
            while data:
                _, mask, _, length = struct.unpack_from("iIII", data)
                name = data[16 : 16 + length].rstrip(b"\0").decode()
                data = data[16 + length :]
                if name and not mask & IN_ISDIR:
                    yield name


if __name__ == "__main__":
    main()
