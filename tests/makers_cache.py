"""Real cache entries without a model: small, whole, and of any age."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import numpy as np

from pipeline.geometry import PixelBudget
from pipeline.keys import DecodeRules, EncodeSpec
from pipeline.store import Entry, Manifest, PageRecord, Store
from pipeline.store.layout import manifest_name

TOWER, OTHER_TOWER = "7" * 64, "8" * 64
DAY_S = 86_400
SPEC = EncodeSpec(
    family="qwen3_vl",
    processor="P",
    contract=1,
    geometry=PixelBudget(16, 2, 1024, 1_048_576),
    resample="bicubic",
    rescale_factor=1 / 255,
    image_mean=(0.5,),
    image_std=(0.5,),
    precision="float32",
    dtype="bfloat16",
    rules=DecodeRules(**{field.name: "a rule" for field in fields(DecodeRules)}),
)


def entry(seed: int, tower: str = TOWER, rows: int = 6, width: int = 24) -> Entry:
    """An entry of finite values; rows = 2 · columns / 2² of the grid."""
    values = np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)
    return Entry.from_bits(
        (values.view(np.uint32) >> 16).astype(np.uint16),
        key=hashlib.sha256(f"{tower} {seed}".encode()).hexdigest(),
        spec=SPEC,
        tower_fingerprint=tower,
        grid=(1, 2, 2 * rows),
        source_size=(100, 200),
        made_by="test",
    )


def put(root: Path, seed: int, tower: str = TOWER, age_days: float = 0.0, now_s: float = 0) -> Path:
    """An entry in the cache, last used so long before `now_s`, if that is given."""
    made = entry(seed, tower)
    store = Store(root, tower)
    store.put(made)
    path = store.path(made.footer.key)
    if now_s:
        os.utime(path, (now_s - age_days * DAY_S,) * 2)
    return path


def flipped(data: bytes) -> bytes:
    """An entry's file with another bit in its last value: before Parquet's own footer."""
    place = len(data) - 9 - int.from_bytes(data[-8:-4], "little")
    return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


def put_manifest(root: Path, digest: str = "d" * 64) -> Path:
    """A document manifest in the cache."""
    store = Store(root, TOWER)
    store.put_manifest(digest, "0" * 16, Manifest(False, (PageRecord(1, "a" * 64, 30, 20),)))
    return root / manifest_name(digest, "0" * 16)


def files_of(root: Path) -> dict[str, bytes]:
    """Every file below a cache but those that are locked, by its path from there."""
    locked = {root / "lock", root / "claims"}
    found = (path for path in sorted(root.rglob("*")) if path.is_file() and path not in locked)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}


@contextmanager
def another_process(root: Path, how: str = "hold_shared") -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the cache's lock until this ends."""
    code = (
        f"import sys; from pathlib import Path; from pipeline.store.hold import {how}\n"
        f"with {how}(Path(sys.argv[1])):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        try:
            yield process
        finally:
            process.kill()
