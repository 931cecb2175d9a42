"""When an entry was last used: its file's mtime, which is what `gc` goes by."""

from __future__ import annotations

import os
import time

from pipeline.store.medium import FileState

# Touched more often, the mtimes of a big job would cost a write for every read.
TOUCH_AFTER_S = 86_400


def is_due(state: FileState) -> bool:
    """True if the last use that was noted is so long ago that a new one must be."""
    return time.time() - state.st_mtime > TOUCH_AFTER_S


def note_use(path: str, known: FileState | None = None) -> None:
    """Say that an entry is used now; `known` is what is known of its file.

    A cache that can only be read keeps its times: that is no reason to refuse the entry.
    """
    try:
        if is_due(known or os.stat(path)):
            os.utime(path)
    except OSError:
        pass
