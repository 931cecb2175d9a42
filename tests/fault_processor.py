"""Runs inside the real vLLM as its logits processor: makes it die or hang when a test wants it.

A request's `vllm_xargs` name the fault: `{"fault": "die"}` ends the process that computes,
`{"fault": "hang"}` holds it for good, `{"fault": "memory"}` asks for memory that is not there.
With `"once": PATH` only the first request that comes by does so. FAULT_AT_START names a file
with the number of starts that shall fail.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor


class FaultProcessor(LogitsProcessor):
    """See the module."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        left = Path(os.environ.get("FAULT_AT_START", os.devnull))
        count = int(left.read_text() or 0) if left.is_file() else 0
        if count:
            left.write_text(str(count - 1))
            raise RuntimeError("this start was to fail")

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        for _, params, _, _ in batch_update.added if batch_update else ():
            extra = params.extra_args or {}
            if "fault" in extra and _comes_first(extra.get("once")):
                _do(extra["fault"])


def _comes_first(path: str | None) -> bool:
    if path is None:
        return True
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _do(fault: str) -> None:
    if fault == "die":
        os._exit(1)
    if fault == "hang":
        time.sleep(3600)
    torch.empty(1 << 50)  # "memory": a petabyte
