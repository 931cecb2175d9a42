"""Where entries and manifests lie, and the few things that may be done to them."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import StoreError
from pipeline.store import check, documents, files
from pipeline.store.documents import Manifest
from pipeline.store.entry import (
    BadEntry,
    Entry,
    Footer,
    entry_problem,
    footer_problem,
    read_footer,
    to_parquet,
)
from pipeline.store.layout import DOCUMENTS, version_directory
from pipeline.store.use import note_use


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in the cache that is not as it should be."""

    path: Path
    why: str


@dataclass(frozen=True, slots=True)
class Store:
    """The cache below `root`, for embeddings of one tower."""

    root: Path
    tower_fingerprint: str

    def path(self, key: str) -> Path:
        """Where the entry of `key` lies or would lie."""
        return version_directory(self.root) / self.tower_fingerprint / key[:2] / f"{key}.parquet"

    def has(self, key: str) -> bool:
        """True if there is an entry under `key`; a stat, its content is checked by readers.

        Counts as a use of the entry: a page that is still encoded each night is not forgotten.
        """
        path = self.path(key)
        try:
            found = os.stat(path)
        except (OSError, ValueError):
            return False
        if not stat.S_ISREG(found.st_mode):
            return False
        note_use(path, found)
        return True

    def put(self, entry: Entry) -> int:
        """Write an entry and return its size on disk in bytes; one already there stays.

        Raises StoreError for an entry that `get` would refuse, and where writing fails.
        """
        key = entry.footer.key
        if (problem := entry_problem(entry, key, self.tower_fingerprint)) is not None:
            raise StoreError(f"entry {key[:12]}… is not written: {problem}")
        path = self.path(key)
        if not self.has(key):
            files.write_whole(path, to_parquet(entry))
        return path.stat().st_size

    def get(self, key: str) -> Entry | BadEntry:
        """The entry under `key` with digest, shape and values checked, or what is wrong with it."""
        path = self.path(key)
        found = check.read_entry(path, key, self.tower_fingerprint)
        if isinstance(found, Entry):
            note_use(path)
        return found

    def footer(self, key: str) -> Footer | None:
        """What the entry says of itself, its payload unread; None if absent or not usable."""
        try:
            footer = read_footer(self.path(key))
        except Exception:  # whatever pyarrow makes of a damaged file: it is a miss
            return None
        if footer_problem(footer, key, self.tower_fingerprint) is not None:
            return None
        note_use(self.path(key))
        return footer

    def quarantine(self, key: str, why: str) -> Path | None:
        """Move a bad entry out of the way, with the reason beside it; None if it is gone."""
        return files.set_aside(self.root, self.path(key), why)

    def manifest(self, file_digest: str, render_digest: str) -> Manifest | None:
        """The pages of a file as decoded before; None if unknown or unreadable."""
        try:
            return documents.from_json(self.manifest_path(file_digest, render_digest).read_bytes())
        except (OSError, *documents.DAMAGE):
            return None

    def put_manifest(self, file_digest: str, render_digest: str, manifest: Manifest) -> None:
        """Write what a file's pages are; a readable manifest already there stays unless it differs.

        It differs only where another version of a decoder made other pixels of the same bytes;
        then the old one would point to entries that are never made again.
        """
        if self.manifest(file_digest, render_digest) != manifest:
            path = self.manifest_path(file_digest, render_digest)
            files.write_whole(path, documents.to_json(manifest))

    def manifest_path(self, file_digest: str, render_digest: str) -> Path:
        """Where the manifest of a file with these bytes, rendered so, lies or would lie."""
        name = f"{file_digest}-{render_digest}.json"
        return version_directory(self.root) / DOCUMENTS / file_digest[:2] / name

    def verify(self) -> list[Problem]:
        """What is wrong below the cache, of every tower; reads all of it and changes nothing."""
        base = version_directory(self.root)
        found = check.check_files(self.root)
        return [Problem(base / file.name, file.why) for file in found if file.why is not None]
