"""Why an engine died, as its own processes noted it: exceptions, not the text of a log.

The root cause is raised in a process of vLLM's that we do not start, and its parent only says
that there was one. Each process of the engine notes exceptions that vLLM logs into one file,
which is read when the engine is dead.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

NOTES_ENV = "PIPELINE_DEATH_NOTES"

# raised by whoever finds another process dead
_SECOND_HAND = {"EngineDeadError", "SystemExit", "KeyboardInterrupt", "EOFError"}
_SECOND_HAND_TEXT = "Engine core initialization failed"
_OUT_OF_MEMORY = {"OutOfMemoryError", "MemoryError"}
# torch's allocator on CPU, and vLLM before it asks a GPU for memory, have no type for it
_OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "Free memory on device")


# what is wrong with arguments or files is wrong the next time, too
_HOPELESS = {"ValueError", "ValidationError", "TypeError", "KeyError", "AttributeError"}
_HOPELESS |= {"ImportError", "ModuleNotFoundError", "FileNotFoundError", "NotImplementedError"}


@dataclass(frozen=True, slots=True)
class Note:
    """One exception: its class by name, and the first line of what it says."""

    type: str
    message: str

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type

    @property
    def hopeless(self) -> bool:
        """True if another start with the same settings would end like this one."""
        return self.type in _HOPELESS and not self.out_of_memory

    @property
    def out_of_memory(self) -> bool:
        """True if memory could not be had, of a GPU or of the machine."""
        said = any(text in self.message for text in _OUT_OF_MEMORY_TEXTS)
        return self.type in _OUT_OF_MEMORY or said


class NoteKeeper(logging.Handler):
    """Appends the exceptions that are logged to a file, a JSON line each; never raises."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            lines = str(error).strip().splitlines()
            note = Note(type(error).__name__, lines[0][:500] if lines else "")
            try:
                with self._path.open("ab", buffering=0) as file:  # appended whole, by any process
                    file.write(json.dumps(asdict(note)).encode() + b"\n")
            except OSError:
                pass


def keep_notes() -> None:
    """In a process of vLLM: note exceptions if our driver has said where to."""
    path = os.environ.get(NOTES_ENV)
    vllm = logging.getLogger("vllm")
    if path and not any(isinstance(handler, NoteKeeper) for handler in vllm.handlers):
        vllm.addHandler(NoteKeeper(Path(path)))


def root_cause(path: Path) -> Note | None:
    """The first exception at first hand in a file of notes; one of memory before any other."""
    notes: list[Note] = []
    try:
        for line in path.read_bytes().splitlines():
            try:
                notes.append(Note(**json.loads(line)))
            except (ValueError, TypeError):  # torn by a kill
                continue
    except OSError:
        return None
    first_hand = [
        note
        for note in notes
        if note.type not in _SECOND_HAND and not note.message.startswith(_SECOND_HAND_TEXT)
    ]
    short = [note for note in first_hand if note.out_of_memory]
    return next(iter(short + first_hand), None)
