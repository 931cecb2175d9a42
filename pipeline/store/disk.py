"""A cache in a directory of this machine, or of one that it mounts."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.durable import sync_directory
from pipeline.errors import StoreError
from pipeline.store.files import write_error, write_whole
from pipeline.store.layout import QUARANTINE, VERSION
from pipeline.store.medium import FileState, Listed, T
from pipeline.store.use import note_use

_STEM_LENGTH = 160  # of a file in quarantine: names end at 255 bytes


@dataclass(frozen=True, slots=True)
class Disk:
    """See `Medium`; whoever deletes or moves files holds the cache's lock."""

    root: Path

    def address(self, name: str = "") -> str:
        return f"{self.root}/{name}" if name else str(self.root)

    def is_there(self) -> bool:
        return self.root.is_dir()

    def top(self) -> list[str]:
        try:
            return sorted(os.listdir(self.root))
        except OSError:  # not there yet, or whoever reads or writes it next says why
            return []

    def listed(self, directory: str) -> list[Listed]:
        path = f"{self.root}/{directory}"
        try:
            with os.scandir(path) as found:
                return sorted(Listed(each.name, each.is_dir()) for each in found)
        except FileNotFoundError:  # no cache yet, or a directory that has gone meanwhile
            return []
        except NotADirectoryError:
            if directory != VERSION:
                return []
            raise StoreError(
                f"`{path}` is no directory", "a file stands where the cache should be"
            ) from None
        except OSError as error:
            raise StoreError(
                f"can't list `{path}`: {error.strerror or error}", "check the directory's owner"
            ) from error

    def state(self, name: str, *, link: bool = False) -> os.stat_result | None:
        path = f"{self.root}/{name}"
        try:
            return os.lstat(path) if link else os.stat(path)
        except FileNotFoundError:
            return None

    def has(self, name: str) -> bool:
        path = f"{self.root}/{name}"
        try:
            found = os.stat(path)
        except (OSError, ValueError):
            return False
        if not stat.S_ISREG(found.st_mode):
            return False
        note_use(path, found)
        return True

    def read(self, name: str, last: int | None = None) -> bytes:
        with open(f"{self.root}/{name}", "rb") as file:
            if last is not None:
                file.seek(max(0, os.fstat(file.fileno()).st_size - last))
            return file.read()

    def load(self, name: str, parse: Callable[[bytes], T], last: int | None = None) -> T:
        return parse(self.read(name, last))

    def write(self, name: str, data: bytes | memoryview, *, once: bool = True) -> None:
        if not (once and self.has(name)):
            write_whole(self.root / name, data)

    def set_aside(self, name: str, why: str) -> str | None:
        target = quarantine_name(name)
        try:
            (self.root / QUARANTINE).mkdir(parents=True, exist_ok=True)
            os.rename(self.root / name, self.root / target)
            sync_directory((self.root / name).parent)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise write_error(self.root / target, error) from error
        write_whole((self.root / target).with_suffix(".txt"), (why + "\n").encode())
        return target

    def delete(self, name: str) -> None:
        path = self.root / name
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise write_error(path, error) from error

    def note_use(self, name: str, known: FileState | None = None) -> None:
        note_use(f"{self.root}/{name}", known)


def quarantine_name(name: str) -> str:
    """A name of its own in the quarantine for a bad file; the reason stands beside it as .txt."""
    stem, dot, ending = name.rpartition("/")[2].rpartition(".")
    if not stem:  # `.x` and `x` have no ending
        stem, dot, ending = f"{dot}{ending}", "", ""
    ending = dot + ending if ending != "txt" else ".file"
    return f"{QUARANTINE}/{stem[:_STEM_LENGTH]}.{time.time_ns()}{ending}"
