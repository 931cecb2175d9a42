"""How small and how fast are cache entries? Ours against plain zstd Parquet of the same tensors.

Values are what the bundled tower makes of rendered pages, in bfloat16; larger entries repeat them,
at a distance that zstd's window at this level (512 KiB) does not span. CPU time of one thread,
medians of interleaved rounds, each way once untimed before it is timed. Ours includes the digest,
the look for values that are not finite, and all other checks; a plain Parquet of pyarrow with
compression="zstd" has none. It may hold the values as a uint16 column, as Arrow's column of
tensors, which alone keeps the shape, or as one binary cell. The last line is JSON.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from pipeline.checkpoint import resolve_model
from pipeline.encode.machine import prepare_process
from pipeline.families import family_of
from pipeline.keys import EncodeSpec
from pipeline.store import Compression, Entry
from pipeline.store.check import entry_of
from pipeline.store.entry import to_parquet

ROOT = Path(__file__).parents[1]
SIZES = {"256 KiB": (1 << 18, 60), "4 MB": (4_000_000, 30), "42 MB": (42_000_000, 9)}
PAGES = 20
KEY, TOWER = "a" * 64, "b" * 64
LARGEST_SHARE = 0.72  # of the values' own bytes

Bits = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to store values: bits → bytes → bits."""

    name: str
    encode: Callable[[Bits], Any]
    decode: Callable[[Any, Bits], Bits]


def main() -> None:
    prepare_process(1)
    pa.set_cpu_count(1)
    spec, rows = tower_output()
    ways = [*ours(spec), *parquets(), *limits()]
    ratios = {}
    for name, (size, rounds) in SIZES.items():
        count = size // 2 // rows.shape[1]
        bits = np.resize(rows, (count, rows.shape[1]))
        figures = measured(ways, bits, rounds)
        print(f"{name}, {count} rows of {rows.shape[1]}: encode MB/s, decode MB/s, stored share")
        for way in ways:
            seconds, back_s, stored = figures[way.name]
            speeds = f"{bits.nbytes / seconds / 1e6:9.0f}{bits.nbytes / back_s / 1e6:9.0f}"
            print(f"  {way.name:22}{speeds}{stored / bits.nbytes:8.3f}")
        ratios[name] = compared(figures, bits.nbytes)
        assert ratios[name]["stored"] <= LARGEST_SHARE, ratios
    print(json.dumps(ratios))


def tower_output() -> tuple[EncodeSpec, Bits]:
    """The bundled tower's rows for some pages, as the bits of bfloat16."""
    import torch

    model = resolve_model(None)
    family = family_of(model)
    spec = family.encode_spec(model)
    tower = family.load_tower(model)
    found = []
    with tempfile.TemporaryDirectory() as directory:
        render = [sys.executable, str(ROOT / "tools" / "render_pages.py"), "--seed", "7"]
        subprocess.run([*render, "--count", str(PAGES), "--out", directory], check=True)
        for path in sorted(Path(directory).glob("*.png")):
            rgb = np.asarray(Image.open(path).convert("RGB"))
            placement = spec.geometry.place(*rgb.shape[:2])
            rows = tower.encode(family.resize(rgb, placement, spec))
            found.append(rows.to(torch.bfloat16).view(torch.uint16).numpy())
    return spec, np.concatenate(found)


# ---------------------------------------------------------------- ways


def ours(spec: EncodeSpec) -> list[Way]:
    def encode(compression: Compression, bits: Bits) -> memoryview:
        made = Entry.from_bits(
            bits, key=KEY, spec=spec, tower_fingerprint=TOWER, grid=None, source_size=(1, 1)
        )
        return to_parquet(made, compression)

    def decode(data: bytes, bits: Bits) -> Bits:
        got = entry_of(data, KEY, TOWER)
        assert isinstance(got, Entry), got
        return got.bits()

    names = {Compression.ZSTD: "ours", Compression.NONE: "ours, none"}
    return [Way(name, partial(encode, kind), decode) for kind, name in names.items()]


def parquets() -> list[Way]:
    """What a person would write, with pyarrow's defaults."""

    def written(column: pa.Array) -> pa.Buffer:
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"embedding": column}), sink, compression="zstd")
        return sink.getvalue()

    def read(data: pa.Buffer) -> Any:
        return pq.read_table(pa.BufferReader(data))["embedding"]

    return [
        Way(
            "uint16 column",
            lambda bits: written(pa.array(bits.reshape(-1))),
            lambda data, bits: read(data).to_numpy().reshape(bits.shape),
        ),
        Way(
            "tensor column",
            lambda bits: written(pa.FixedShapeTensorArray.from_numpy_ndarray(bits)),
            lambda data, bits: read(data).combine_chunks().to_numpy_ndarray(),
        ),
        Way(
            "binary cell",
            lambda bits: written(pa.array([bits.tobytes()], pa.binary())),
            lambda data, bits: np.frombuffer(read(data)[0].as_buffer(), np.uint16).reshape(
                bits.shape
            ),
        ),
    ]


def limits() -> list[Way]:
    codec = pa.Codec("zstd", 1)  # Parquet's level, too

    def expanded(data: pa.Buffer, bits: Bits) -> Bits:
        return np.frombuffer(codec.decompress(data, bits.nbytes), np.uint16).reshape(bits.shape)

    return [
        Way("zstd alone", codec.compress, expanded),
        Way("memcpy", np.copy, lambda data, bits: np.copy(data)),
    ]


# ---------------------------------------------------------------- measuring


def measured(ways: list[Way], bits: Bits, rounds: int) -> dict[str, tuple[float, float, int]]:
    """Median CPU seconds to encode and to decode, and bytes stored, by name."""
    times: dict[str, list[tuple[float, float, int]]] = {way.name: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            way.decode(bytes(way.encode(bits)) if way.name != "memcpy" else bits, bits)
            started = time.process_time()
            data = way.encode(bits)
            encode_s = time.process_time() - started
            data = data if way.name == "memcpy" else bytes(data)  # as a file is read
            started = time.process_time()
            back = way.decode(data, bits)
            decode_s = time.process_time() - started
            times[way.name].append((encode_s, decode_s, memoryview(data).nbytes))
            assert np.array_equal(back, bits), way.name
    return {
        name: (
            statistics.median(each[0] for each in found),
            statistics.median(each[1] for each in found),
            found[0][2],
        )
        for name, found in times.items()
    }


def compared(figures: dict[str, tuple[float, float, int]], raw_bytes: int) -> dict[str, float]:
    """The stored share, and how many times as fast as each plain Parquet."""
    encode_s, decode_s, stored = figures["ours"]
    found = {"stored": round(stored / raw_bytes, 3)}
    for name in ("uint16 column", "tensor column", "binary cell"):
        short = name.split()[0]
        found[f"encode_to_{short}"] = round(figures[name][0] / encode_s, 2)
        found[f"decode_to_{short}"] = round(figures[name][1] / decode_s, 2)
    return found


if __name__ == "__main__":
    main()
