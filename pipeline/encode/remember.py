"""Note in the memo what a run found, so that the next one need not look."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from pipeline.encode.digests import Digests
from pipeline.encode.records import Done, Outcome, Target
from pipeline.keys import canonical_json
from pipeline.memo import Memo, is_settled, state_of
from pipeline.pages import Discovery
from pipeline.rerun import target_subject


def subject_of(target: Target) -> str:
    """The name of what is remembered of pages that are encoded for `target`."""
    parts = {
        "spec": asdict(target.spec),
        "render": asdict(target.render),
        "tower": target.store.tower_fingerprint,
    }
    return target_subject(hashlib.sha256(canonical_json(parts)).hexdigest())


def remember_pages(
    memo: Memo, target: Target, found: Discovery, outcomes: Iterable[Outcome], digests: Digests
) -> None:
    """Note the keys of each file whose pages are all in the cache, and which files have none."""
    subject = subject_of(target)
    keys: dict[Path, list[str]] = {}
    failed: set[Path] = set()
    for outcome in outcomes:
        if isinstance(outcome, Done):
            keys.setdefault(outcome.file.path, []).append(outcome.key)
        elif outcome.file is not None:
            failed.add(Path(outcome.file))
    for file in found.files:
        path = file.path
        state = digests.settled.get(path)
        if state and path in keys and path not in failed:
            memo.note(subject, os.path.abspath(path), state, keys[path])
    for path, before in found.pageless:
        if is_settled(before):
            memo.note(subject, os.path.abspath(path), state_of(before), [])
