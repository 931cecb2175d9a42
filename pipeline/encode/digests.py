"""Digests of page files, each file read once while it is as it was."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pipeline.memo import Memo, is_settled, program_state, state_of
from pipeline.pages.sources import source_digest, source_stat


@dataclass(frozen=True, slots=True)
class Digested:
    """blake3 of a file's bytes, the kind that they announce or "", and the file's state then."""

    digest: str
    kind: str
    state: str


class Digests:
    """Path → digest; what a memo remembers is not read again.

    `settled` holds the states of the files asked for that can be relied on.
    """

    def __init__(self, memo: Memo) -> None:
        self._memo = memo
        self._subject = f"digest {program_state()}"
        self.settled: dict[Path, str] = {}

    def of(self, path: Path) -> Digested:
        """The digest of a page file or a member of an archive; raises OSError or Refused."""
        found = source_stat(path)
        state, name = state_of(found), os.path.abspath(path)
        settled = is_settled(found)
        fact = self._memo.recall(self._subject, name, state) if settled else None
        if fact is None:
            fact = source_digest(path)
            if settled:
                self._memo.note(self._subject, name, state, fact)
        if settled and self.settled.setdefault(path, state) != state:
            self.settled[path] = ""  # it changes while we work
        digest, kind = fact
        return Digested(digest, kind, state)
