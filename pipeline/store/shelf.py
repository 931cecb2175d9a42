"""Where entries and manifests lie, and the few things that may be done to them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.durable import TEMPORARY_SUFFIX, sync_directory
from pipeline.errors import StoreError
from pipeline.store import documents, files
from pipeline.store.documents import Manifest
from pipeline.store.entry import (
    FORMAT_VERSION,
    BadEntry,
    Entry,
    Footer,
    entry_problem,
    footer_problem,
    from_parquet,
    read_footer,
    to_parquet,
)

_DOCUMENTS = "documents"
_QUARANTINE = "quarantine"


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

    @property
    def _version_dir(self) -> Path:
        return self.root / f"v{FORMAT_VERSION}"

    def path(self, key: str) -> Path:
        """Where the entry of `key` lies or would lie."""
        return self._version_dir / self.tower_fingerprint / key[:2] / f"{key}.parquet"

    def has(self, key: str) -> bool:
        """True if there is an entry under `key`; a stat, its content is checked by readers."""
        return os.path.isfile(self.path(key))  # unlike `Path.is_file`, False for any name

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
        return _checked_entry(self.path(key), key, self.tower_fingerprint)

    def footer(self, key: str) -> Footer | None:
        """What the entry says of itself, its payload unread; None if absent or not usable."""
        try:
            footer = read_footer(self.path(key))
        except Exception:  # whatever pyarrow makes of a damaged file: it is a miss
            return None
        return footer if footer_problem(footer, key, self.tower_fingerprint) is None else None

    def quarantine(self, key: str, why: str) -> Path | None:
        """Move a bad entry out of the way, with the reason beside it; None if it is gone."""
        path = self.path(key)
        target = self.root / _QUARANTINE / f"{key}.{time.time_ns()}.parquet"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
            sync_directory(path.parent)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise files.write_error(target, error) from error
        files.write_whole(target.with_suffix(".txt"), (why + "\n").encode())
        return target

    def manifest(self, file_digest: str, render_digest: str) -> Manifest | None:
        """The pages of a file as decoded before; None if unknown or unreadable."""
        try:
            return documents.from_json(self._manifest_path(file_digest, render_digest).read_bytes())
        except (OSError, *documents.DAMAGE):
            return None

    def put_manifest(self, file_digest: str, render_digest: str, manifest: Manifest) -> None:
        """Write what a file's pages are; a readable manifest already there stays unless it differs.

        It differs only where another version of a decoder made other pixels of the same bytes;
        then the old one would point to entries that are never made again.
        """
        if self.manifest(file_digest, render_digest) != manifest:
            path = self._manifest_path(file_digest, render_digest)
            files.write_whole(path, documents.to_json(manifest))

    def _manifest_path(self, file_digest: str, render_digest: str) -> Path:
        name = f"{file_digest}-{render_digest}.json"
        return self._version_dir / _DOCUMENTS / file_digest[:2] / name

    def verify(self) -> list[Problem]:
        """What is wrong below the cache, of every tower; reads all of it and changes nothing."""
        if not self._version_dir.is_dir():
            return []
        paths = sorted(path for path in self._version_dir.rglob("*") if not path.is_dir())
        return [Problem(path, why) for path in paths for why in _problems_of(path)]


def _problems_of(path: Path) -> Iterator[str]:
    if path.suffix == TEMPORARY_SUFFIX:
        yield "a temporary file that was left over"
    elif path.parent.name != path.name[:2]:
        yield "it lies in the wrong directory"
    elif path.parts[-3] == _DOCUMENTS:
        yield from _manifest_problems(path)
    elif path.suffix == ".parquet":
        found = _checked_entry(path, path.stem, path.parts[-3])
        if isinstance(found, BadEntry):
            yield found.why
    else:
        yield "a file that does not belong here"


def _manifest_problems(path: Path) -> Iterator[str]:
    try:
        documents.from_json(path.read_bytes())
    except (OSError, *documents.DAMAGE) as error:
        yield f"the manifest is unreadable: {error}"


def _checked_entry(path: Path, key: str, tower_fingerprint: str) -> Entry | BadEntry:
    try:
        entry = from_parquet(path.read_bytes())
    except FileNotFoundError:
        return BadEntry(key, "there is no such entry")
    except Exception as error:  # whatever pyarrow makes of a damaged file
        return BadEntry(key, f"the file is damaged: {error}")
    problem = entry_problem(entry, key, tower_fingerprint)
    return entry if problem is None else BadEntry(key, problem)
