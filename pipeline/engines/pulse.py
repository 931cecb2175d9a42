"""Signs of life of a vLLM that computes: sent when its engine makes steps, not by a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

EVERY_S = 5.0


def watch_steps(send: Callable[[], object]) -> bool:
    """Call `send` after steps of the engines of this process, at most once in `EVERY_S`.

    To be called before an engine is made. False if this vLLM can't be watched: then silence
    means nothing. An engine that records no statistics gives no sign either.
    """
    try:
        from vllm.v1.metrics.loggers import StatLoggerManager

        record = StatLoggerManager.record
    except (ImportError, AttributeError):
        return False
    last_s = -EVERY_S

    def counted(self: Any, *given: Any, **named: Any) -> Any:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= EVERY_S:
            last_s = now_s
            send()
        return record(self, *given, **named)

    StatLoggerManager.record = counted  # type: ignore[method-assign]
    return True
