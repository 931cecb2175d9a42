"""A cache in an object store, or on whatever else fsspec opens.

There are no locks and no renames there. An object is whole or absent; a key is written under the
condition that it is not there, or else read back; deleting keeps off what is young. Two encoders
may at worst encode a page twice. Faults that pass are retried with backoff by the file system.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pipeline.errors import StoreError
from pipeline.store.disk import quarantine_name
from pipeline.store.faults import code_of, is_unsupported, open_file_system, told
from pipeline.store.medium import FileState, Listed, T
from pipeline.store.presence import Presence
from pipeline.store.renewal import Renewals
from pipeline.store.use import is_due

_TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")
_THERE = ("PreconditionFailed", "412")
_EMPTY = ("InvalidRange", "416")  # the end of an object of no bytes
_CONFLICT = "ConditionalRequestConflict"  # another writes the same key at this moment


@dataclass(frozen=True, slots=True)
class ObjectState:
    """See `FileState`."""

    st_mode: int
    st_size: int
    st_mtime_ns: int

    @property
    def st_mtime(self) -> float:
        """In seconds."""
        return self.st_mtime_ns / 1e9


class Objects:
    """See `Medium`. One for each process and URL: it knows what it has listed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._files, self._root = open_file_system(url)
        self._presence = Presence(self.listed)
        self._renewals = Renewals(self._renew)
        self._conditional = True

    def address(self, name: str = "") -> str:
        return f"{self._url}/{name}" if name else self._url

    def is_there(self) -> bool:
        return bool(self.listed(""))

    def top(self) -> list[str]:
        return [each.name for each in self.listed("")]

    def listed(self, directory: str) -> list[Listed]:
        path = self._path(directory)
        try:
            with told("list", self.address(directory)):
                found = self._files.ls(path, detail=True)
        except FileNotFoundError:
            return []
        below = (info for info in found if info["name"].rstrip("/") != path)
        return sorted(_listed(info) for info in below)

    def state(self, name: str, *, link: bool = False) -> FileState | None:
        try:
            with told("read", self.address(name)):
                return _state(self._files.info(self._path(name)))
        except FileNotFoundError:
            return None

    def has(self, name: str) -> bool:
        used_ns = self._presence.last_use_ns(name)
        known = None if used_ns is None else ObjectState(stat.S_IFREG, 0, used_ns)
        found = known or self.state(name)  # a miss is confirmed: it may have come since
        if found is None or not stat.S_ISREG(found.st_mode):
            return False
        self.note_use(name, found)
        return True

    def read(self, name: str, last: int | None = None) -> bytes:
        with told("read", self.address(name)):
            try:
                start = None if last is None else -last
                data: bytes = self._files.cat_file(self._path(name), start=start)
            except OSError as error:
                if last is None or code_of(error) not in _EMPTY:
                    raise
                return b""
            return data

    def load(self, name: str, parse: Callable[[bytes], T], last: int | None = None) -> T:
        return parse(self.read(name, last))

    def write(self, name: str, data: bytes | memoryview, *, once: bool = True) -> None:
        body = bytes(data)
        with told("write", self.address(name)):
            if not (once and self._create(name, body)):
                self._write(name, body, once)
        self._presence.used(name)

    def _create(self, name: str, body: bytes) -> bool:
        """Write what is not there; False if that has to be done without the store's help."""
        if not self._conditional:
            return False
        try:
            self._files.pipe_file(self._path(name), body, mode="create")
        except FileExistsError:  # another was first, with an entry of the same key
            return True
        except Exception as error:
            if code_of(error) in _THERE:
                return True
            if code_of(error) != _CONFLICT:
                if not is_unsupported(error):
                    raise
                self._conditional = False
            return False
        return True

    def _write(self, name: str, body: bytes, once: bool) -> None:
        """Write and read back: no condition keeps a broken upload from taking the name."""
        if once and self.state(name) is not None:
            return
        for _ in range(2):  # another may write the same key at the same time
            self._files.pipe_file(self._path(name), body)
            if self._holds(name, body):
                return
        raise StoreError(
            f"`{self.address(name)}` does not hold what was written to it",
            "`pipeline cache verify` tells what else is damaged",
        )

    def _holds(self, name: str, body: bytes) -> bool:
        try:
            return bool(self._files.cat_file(self._path(name)) == body)
        except FileNotFoundError:
            return False

    def set_aside(self, name: str, why: str) -> str | None:
        target = quarantine_name(name)
        reason = f"{target.rpartition('.')[0]}.txt"
        try:
            with told("move", self.address(name)):
                self._files.cp_file(self._path(name), self._path(target))
                self._files.pipe_file(self._path(reason), f"{why}\n".encode())
                self._files.rm_file(self._path(name))
        except FileNotFoundError:
            return None
        finally:
            self._presence.gone(name)
        return target

    def delete(self, name: str) -> None:
        try:
            with told("delete", self.address(name)):
                self._files.rm_file(self._path(name))
        except FileNotFoundError:
            pass
        self._presence.gone(name)

    def note_use(self, name: str, known: FileState | None = None) -> None:
        if known is None and self._presence.is_listed(name):
            used_ns = self._presence.last_use_ns(name)
            known = None if used_ns is None else ObjectState(stat.S_IFREG, 0, used_ns)
        if known is None or is_due(known):
            self._presence.used(name)  # asked again, it is not renewed twice
            self._renewals.add(name)

    def _renew(self, name: str) -> None:
        path = self._path(name)
        info = self._files.info(path)
        if not is_due(_state(info)):
            return
        if hasattr(self._files, "call_s3"):
            # the only way to a new time; what it says of itself must change with it
            storage = info.get("StorageClass") or "STANDARD"
            same = {} if storage == "STANDARD" else {"StorageClass": storage}
            self._files.cp_file(path, path, MetadataDirective="REPLACE", **same)
        else:
            self._files.touch(path, truncate=False)

    def finish(self) -> None:
        """Wait until the last uses are noted."""
        self._renewals.finish()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def _listed(info: Mapping[str, Any]) -> Listed:
    name = info["name"].rstrip("/").rpartition("/")[2]
    return Listed(name, info["type"] == "directory", _state(info))


def _state(info: Mapping[str, Any]) -> ObjectState:
    mode = stat.S_IFDIR if info["type"] == "directory" else stat.S_IFREG
    return ObjectState(mode, info.get("size") or 0, _time_ns(info))


def _time_ns(info: Mapping[str, Any]) -> int:
    """When it was last written; now, that is too young for anything, where nobody tells."""
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, str) and value:
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return int(value.timestamp() * 1e9)
        if isinstance(value, (int, float)):
            return int(value * 1e9)
    return time.time_ns()
