"""The `pipeline` command with a stub for the vision tower: it computes for a given time, no torch.

    python encoder_with_stub_tower.py SECONDS LOG encode DIR --cache DIR …

Each page is logged by its key when it has been computed, so that work done twice can be counted.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import numpy as np

from pipeline.cli import main
from pipeline.encode import stages
from pipeline.encode.records import Encoded, Resized
from pipeline.store import Entry

WIDTH = 64


def stub_encode(
    seconds: float, log: int | None = None
) -> Callable[[stages.TowerAtHand, Resized], Encoded]:
    """Pages take `seconds` of processor time each and come out as noise made of their key."""

    def encode(self: stages.TowerAtHand, page: Resized) -> Encoded:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass
        placed, target = page.placed, self._target
        rng = np.random.default_rng(int(placed.key[:16], 16))
        values = rng.normal(size=(placed.placement.tokens, WIDTH)).astype(np.float32)
        entry = Entry.from_bits(
            (values.view(np.uint32) >> 16).astype("<u2"),
            key=placed.key,
            spec=target.spec,
            tower_fingerprint=target.store.tower_fingerprint,
            grid=placed.placement.grid,
            source_size=(placed.read.height_px, placed.read.width_px),
        )
        if log is not None:
            os.write(log, f"{placed.key}\n".encode())
        return Encoded(placed, entry)

    return encode


if __name__ == "__main__":
    log = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    stages.TowerAtHand.encode = stub_encode(float(sys.argv[1]), log)  # type: ignore[method-assign]
    stages._resized = lambda page, target: Resized(page, page.read.rgb)  # type: ignore[arg-type]
    main(sys.argv[3:])
