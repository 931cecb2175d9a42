"""How far a verification has come, and what it found: a file of JSON lines to go on from.

Lines: the cache that it is about; then a line per problem; after each few seconds, and at the
end, a mark with the last file read and the totals. What follows the last mark is read again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.durable import replace_file, sync
from pipeline.errors import StoreError, UsageError
from pipeline.store.check import Checked, check_files
from pipeline.store.files import write_error
from pipeline.store.layout import FORMAT_VERSION, whole_name
from pipeline.store.location import Location, address_of
from pipeline.store.media import medium_of
from pipeline.store.walk import walk

_MARK_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Found:
    """Something that is not as it should be: a path from the version directory, and why."""

    path: str
    why: str


@dataclass(slots=True)
class Progress:
    """What was read so far: `after` is the last file's path from the version directory."""

    after: str | None = None
    files: int = 0
    bytes: int = 0
    problems: list[Found] = field(default_factory=list)
    done: bool = False

    def add(self, checked: Checked) -> None:
        self.after = checked.name
        self.files += 1
        self.bytes += checked.bytes
        if checked.why is not None:
            self.problems.append(Found(checked.name, checked.why))


class Logbook:
    """Progress that outlives its process, if it was given a file."""

    def __init__(self, root: Location, path: Path | None) -> None:
        self.path = path
        self.progress = Progress()
        self._root = root
        self._written = 0  # how many problems are in the file
        self._marked_s = time.monotonic()
        if path is not None:
            self._open(path)

    def _open(self, path: Path) -> None:
        if path.exists():
            found = read_progress(self._root, path)
            if not found.done:
                self.progress = found
        head = {"cache": address_of(self._root), "format_version": FORMAT_VERSION}
        try:
            replace_file(path, [_line(head), *self._news()])
        except OSError as error:
            raise _unwritable(path, error) from error

    def note(self, checked: Checked) -> None:
        """Keep what became of the next file."""
        self.progress.add(checked)
        if time.monotonic() - self._marked_s > _MARK_EVERY_S:
            self.mark()

    def close(self) -> None:
        """Say that every file was read."""
        self.progress.done = True
        self.mark()

    def mark(self) -> None:
        """Write down how far it has come."""
        self._marked_s = time.monotonic()
        if self.path is None:
            return
        try:
            with self.path.open("ab") as file:
                file.writelines(self._news())
                sync(file)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def _news(self) -> Iterable[bytes]:
        progress = self.progress
        for problem in progress.problems[self._written :]:
            yield _line({"problem": problem.path, "why": problem.why})
        self._written = len(progress.problems)
        names = ("after", "files", "bytes", "done")
        yield _line({name: getattr(progress, name) for name in names})


def read_progress(root: Location, path: Path) -> Progress:
    """What a state file of this cache says up to its last mark.

    Raises UsageError for a file that is none, or of another cache.
    """
    progress, unmarked = Progress(), []
    hint = "name another file, or delete it to begin anew"
    try:
        head, *lines = path.read_bytes().split(b"\n")
        cache = json.loads(head)["cache"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"`{path}` is no state file of `pipeline cache verify`", hint) from error
    if cache != address_of(root):
        raise UsageError(f"the state file `{path}` is of the cache `{cache}`", hint)
    for line in lines[:-1]:  # what follows the last newline is torn
        try:
            record = json.loads(line)
        except ValueError:
            break
        if "problem" in record:
            unmarked.append(Found(record["problem"], record["why"]))
        else:
            progress.problems += unmarked
            unmarked = []
            progress.after, progress.done = record["after"], record["done"]
            progress.files, progress.bytes = record["files"], record["bytes"]
    return progress


def _line(record: dict[str, Any]) -> bytes:
    # file names are bytes: what is not UTF-8 comes as lone surrogates, which ASCII JSON can hold
    return json.dumps(record, ensure_ascii=True).encode() + b"\n"


def _unwritable(path: Path, error: OSError) -> StoreError:
    found = write_error(path, error)
    return StoreError(found.message, "choose another file with `--state FILE`")


def verify(
    root: Location,
    logbook: Logbook,
    say: Callable[[Found], None],
    watch: Callable[[int], object] = lambda size: None,
) -> Progress:
    """Read what the logbook has not seen of the cache `root`; changes nothing there.

    `say` gets each problem, first those that are known; `watch` the size of each file. Stopped at
    any point, the same call with the logbook's file goes on from there.
    """
    for problem in logbook.progress.problems:
        say(problem)
    try:
        for checked in check_files(root, logbook.progress.after):
            logbook.note(checked)
            watch(checked.bytes)
            if checked.why is not None:
                say(Found(checked.name, checked.why))
    except BaseException:
        logbook.mark()
        raise
    logbook.close()
    return logbook.progress


def total_bytes(root: Location) -> int:
    """What a whole verification has to read, for a progress bar; a stat per file."""
    medium, total = medium_of(root), 0
    for place in walk(root):
        try:
            found = place.state or medium.state(whole_name(place.name))
        except OSError:
            continue
        total += 0 if found is None else found.st_size
    return total
