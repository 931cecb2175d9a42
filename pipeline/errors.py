"""What can go wrong: exceptions that stop a command, failures that cost one item, exit codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import IntEnum, StrEnum
from typing import Any


class ExitCode(IntEnum):
    """Exit codes of every command."""

    OK = 0
    ERROR = 1
    USAGE = 2
    SOME_FAILED = 3
    STOPPED = 4
    LOCKED = 5
    ENGINE_LOST = 6
    DIFFERENT = 7


class PipelineError(Exception):
    """Stops the command: `message` says what is wrong, `hint` the way out."""

    exit_code = ExitCode.ERROR

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(PipelineError):
    """The command line or the configuration can't be meant."""

    exit_code = ExitCode.USAGE


class CheckpointError(PipelineError):
    """The model directory can't be used as it is."""


class StoreError(PipelineError):
    """The embedding cache can't be read or written."""


class JobError(PipelineError):
    """The job file as a whole can't be run."""


class MissingExtraError(PipelineError):
    """An optional dependency is not installed; the hint is the install command."""


class LockedError(PipelineError):
    """Another run holds the lock of this run directory."""

    exit_code = ExitCode.LOCKED


class EngineLostError(PipelineError):
    """The engine can't be started or kept alive."""

    exit_code = ExitCode.ENGINE_LOST


class Stage(StrEnum):
    """Where a failed item fell out of its line."""

    READ = "read"
    DECODE = "decode"
    RESIZE = "resize"
    ENCODE = "encode"
    STORE = "store"
    VALIDATE = "validate"
    ENGINE = "engine"


class Reason(StrEnum):
    """Why an item failed; `REASONS` says which stage may give which."""

    NOT_FOUND = "not_found"
    UNREADABLE = "unreadable"
    OUTSIDE_ROOT = "outside_root"
    CORRUPT = "corrupt"
    TRUNCATED = "truncated"
    TOO_LARGE = "too_large"
    ENCRYPTED = "encrypted"
    UNSUPPORTED = "unsupported"
    NO_SUCH_PAGE = "no_such_page"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    ASPECT_RATIO = "aspect_ratio"
    NOT_FINITE = "not_finite"
    TOWER_ERROR = "tower_error"
    BAD_ENTRY = "bad_entry"
    NOT_CACHED = "not_cached"
    BAD_LINE = "bad_line"
    BAD_FIELD = "bad_field"
    BAD_IMAGE = "bad_image"
    BAD_EMBEDDING = "bad_embedding"
    TOO_LONG = "too_long"
    REJECTED = "rejected"
    ENGINE_DEATH = "engine_death"
    ENGINE_ERROR = "engine_error"


_R = Reason
REASONS: dict[Stage, frozenset[Reason]] = {
    Stage.READ: frozenset({_R.NOT_FOUND, _R.UNREADABLE, _R.OUTSIDE_ROOT}),
    Stage.DECODE: frozenset(
        {_R.CORRUPT, _R.TRUNCATED, _R.TOO_LARGE, _R.ENCRYPTED, _R.UNSUPPORTED, _R.NO_SUCH_PAGE}
        | {_R.CRASHED, _R.TIMED_OUT}
    ),
    Stage.RESIZE: frozenset({_R.ASPECT_RATIO}),
    Stage.ENCODE: frozenset({_R.NOT_FINITE, _R.TOWER_ERROR}),
    Stage.STORE: frozenset({_R.BAD_ENTRY, _R.NOT_CACHED}),
    Stage.VALIDATE: frozenset(
        {_R.BAD_LINE, _R.BAD_FIELD, _R.BAD_IMAGE, _R.BAD_EMBEDDING, _R.TOO_LONG}
    ),
    Stage.ENGINE: frozenset({_R.REJECTED, _R.ENGINE_DEATH, _R.ENGINE_ERROR}),
}


@dataclass(frozen=True, slots=True)
class Failure:
    """One item that ended without a result; the same record in every report.

    `page` counts from 1 and is None where the whole file failed.
    """

    file: str | None
    page: int | None
    stage: Stage
    reason: Reason
    detail: str = ""
    custom_id: str | None = None
    attempts: int = 1
    retryable: bool = False

    def __post_init__(self) -> None:
        assert self.reason in REASONS[self.stage], (self.stage, self.reason)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Failure:
        """The failure that `as_record` gave; other keys are passed over. Raises KeyError and
        ValueError for a record of another version.
        """
        values = {field.name: record[field.name] for field in fields(cls) if field.name in record}
        values |= {"stage": Stage(record["stage"]), "reason": Reason(record["reason"])}
        return cls(**values)

    def as_record(self) -> dict[str, Any]:
        """The failure as JSON data; `custom_id` only where there is one."""
        record = {key: value for key, value in asdict(self).items() if key != "custom_id"}
        head = {} if self.custom_id is None else {"custom_id": self.custom_id}
        return head | record
