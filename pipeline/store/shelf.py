"""Where entries and manifests lie, and the few things that may be done to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import StoreError
from pipeline.store import check, documents
from pipeline.store.documents import Manifest
from pipeline.store.entry import (
    BadEntry,
    Compression,
    Entry,
    Footer,
    entry_problem,
    footer_problem,
    read_footer,
    to_parquet,
)
from pipeline.store.layout import entry_name, manifest_name
from pipeline.store.location import Location
from pipeline.store.logbook import Found
from pipeline.store.media import access_to
from pipeline.store.medium import TAIL_BYTES, Access, DamagedError


@dataclass(frozen=True, slots=True)
class Store:
    """The cache below `root`, for embeddings of one tower.

    `compression` is of entries that are written; those that are read may have either.
    """

    root: Location
    tower_fingerprint: str
    compression: Compression = Compression.ZSTD

    @property
    def access(self) -> Access:
        """The files of the cache, through its local tier if it has one."""
        return access_to(self.root)

    def name(self, key: str) -> str:
        """The path of the entry of `key` from the cache's root."""
        return entry_name(self.tower_fingerprint, key)

    def path(self, key: str) -> Path:
        """Where the entry of `key` lies or would lie in a cache on a disk."""
        assert isinstance(self.root, Path), self.root
        return self.root / self.name(key)

    def has(self, key: str) -> bool:
        """True if there is an entry under `key`; its content is checked by readers.

        Counts as a use of the entry: a page that is still encoded each night is not forgotten.
        """
        return self.access.has(self.name(key))

    def put(self, entry: Entry) -> int:
        """Write an entry and return its stored size in bytes; one already there stays.

        Raises StoreError for an entry that `get` would refuse, and where writing fails.
        """
        key = entry.footer.key
        if (problem := entry_problem(entry, key, self.tower_fingerprint)) is not None:
            raise StoreError(f"entry {key[:12]}… is not written: {problem}")
        data = to_parquet(entry, self.compression)
        self.access.write(self.name(key), data)
        return data.nbytes

    def get(self, key: str) -> Entry | BadEntry:
        """The entry under `key` with digest, shape and values checked, or what is wrong with it."""
        name = self.name(key)
        found = check.read_entry(self.access, name, key, self.tower_fingerprint)
        if isinstance(found, Entry):
            self.access.note_use(name)
        return found

    def footer(self, key: str) -> Footer | None:
        """What the entry says of itself, its payload unread; None if absent or not usable."""

        def parse(tail: bytes) -> Footer:
            try:
                footer = read_footer(tail)
            except Exception as error:  # whatever pyarrow makes of a damaged file: it is a miss
                raise DamagedError(str(error)) from error
            if (problem := footer_problem(footer, key, self.tower_fingerprint)) is not None:
                raise DamagedError(problem)
            return footer

        try:
            footer = self.access.load(self.name(key), parse, TAIL_BYTES)
        except (OSError, DamagedError):
            return None
        self.access.note_use(self.name(key))
        return footer

    def quarantine(self, key: str, why: str) -> str | None:
        """Move a bad entry out of the way, with the reason beside it; None if it is gone.

        Gives its path from the cache's root.
        """
        return self.access.set_aside(self.name(key), why)

    def manifest(self, file_digest: str, render_digest: str) -> Manifest | None:
        """The pages of a file as decoded before; None if unknown or unreadable."""
        try:
            name = manifest_name(file_digest, render_digest)
            return self.access.load(name, check.manifest_of)
        except (OSError, DamagedError):
            return None

    def put_manifest(self, file_digest: str, render_digest: str, manifest: Manifest) -> None:
        """Write what a file's pages are; a readable manifest already there stays unless it differs.

        It differs only where another version of a decoder made other pixels of the same bytes;
        then the old one would point to entries that are never made again.
        """
        if self.manifest(file_digest, render_digest) != manifest:
            name = manifest_name(file_digest, render_digest)
            self.access.write(name, documents.to_json(manifest), once=False)

    def verify(self) -> list[Found]:
        """What is wrong below the cache, of every tower; reads all of it and changes nothing."""
        found = check.check_files(self.root)
        return [Found(file.name, file.why) for file in found if file.why is not None]
