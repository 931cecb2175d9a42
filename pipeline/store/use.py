"""When an entry was last used: its file's mtime, which is what `gc` goes by."""

from __future__ import annotations

import os
import time
from pathlib import Path

# Touched more often, the mtimes of a big job would cost a write for every read.
TOUCH_AFTER_S = 86_400


def note_use(path: Path, known: os.stat_result | None = None) -> None:
    """Say that an entry is used now; `known` is what is known of its file.

    A cache that can only be read keeps its times: that is no reason to refuse the entry.
    """
    try:
        found = known or os.stat(path)
        if time.time() - found.st_mtime > TOUCH_AFTER_S:
            os.utime(path)
    except OSError:
        pass
