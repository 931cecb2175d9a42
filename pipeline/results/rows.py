"""One row per request of a job, whatever became of it.

Memory holds where each answer lies, not the answers: results.jsonl is read once to find them, and
then by place. No lock is taken, so a run may append meanwhile; a torn last line is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.errors import Failure, PipelineError
from pipeline.jobs import JobLine
from pipeline.journal import complete_lines
from pipeline.run.line import run_directory_of
from pipeline.run.quality import DEFECTS, text_of
from pipeline.run.survey import JobSource

STATES = ("ok", "flagged", "failed", "pending")


@dataclass(frozen=True, slots=True)
class Row:
    """One request: `status` is one of STATES; `flagged` is an answer that is of no use.

    `text` is the first choice's, `choices` are the texts of all; `pages` count from 1.
    """

    custom_id: str | None
    status: str
    pages: tuple[tuple[str, int | None], ...]
    choices: tuple[str, ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    attempts: int | None = None
    flags: tuple[str, ...] = ()
    reason: str | None = None
    detail: str | None = None

    @property
    def text(self) -> str | None:
        """The answer; None where there is none."""
        return self.choices[0] if self.choices else None

    def as_record(self) -> dict[str, Any]:
        """JSON data; file and page are those of the first page."""
        file, page = self.pages[0] if self.pages else (None, None)
        return {
            "custom_id": self.custom_id,
            "status": self.status,
            "file": file,
            "page": page,
            "pages": [{"file": name, "page": number} for name, number in self.pages],
            "text": self.text,
            "choices": list(self.choices),
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "attempts": self.attempts,
            "flags": list(self.flags),
            "reason": self.reason,
            "detail": self.detail,
        }


@dataclass(frozen=True, slots=True)
class RunResults:
    """A job and its run directory; `places` are the offsets of answers in results.jsonl."""

    source: JobSource
    directory: Path
    places: dict[str, int]
    errors: dict[str, dict[str, Any]]

    def rows(self) -> Iterator[Row]:
        """One per line of the job, in its order; one answer is in memory at a time."""
        path = self.directory / "results.jsonl"
        if not path.exists():
            for line in self.source.lines():
                yield self._row(line, None)
            return
        with path.open("rb") as file:
            for line in self.source.lines():
                yield self._row(line, file)

    def without_line(self) -> int:
        """How many answers belong to no line of the job any more."""
        named = {line.custom_id for line in self.source.lines()}
        return sum(name not in named for name in self.places)

    def _row(self, line: JobLine | Failure, results: BinaryIO | None) -> Row:
        name = line.custom_id
        if name in self.places and results is not None:
            results.seek(self.places[name])
            return _answered(json.loads(results.readline()))
        error = self.errors.get(name) if name is not None else None
        if error is None and isinstance(line, Failure):
            error = line.as_record()
        pages: tuple[tuple[str, int | None], ...] = ()
        if isinstance(line, JobLine):
            pages = tuple((str(image.path), image.page) for image in line.images)
        if error is None:
            return Row(name, "pending", pages)
        if not pages and error.get("page") is not None:
            pages = ((str(error["file"]), error["page"]),)
        return Row(
            name,
            "failed",
            pages,
            attempts=error.get("attempts"),
            reason=f"{error.get('stage')}/{error.get('reason')}",
            detail=error.get("detail"),
        )


def open_results(job: Path, base: Path | None = None) -> RunResults:
    """Find the answers to a job; raises JobError or PipelineError where there are none to find."""
    directory = run_directory_of(job)
    if not directory.is_dir():
        raise PipelineError(
            f"`{job}` has not been run: there is no `{directory}`", f"pipeline run {job}"
        )
    # nothing is read of the images, so they may be named wherever they are
    anywhere = (Path(job.resolve().anchor),)
    source = JobSource.of(job, base, anywhere, directory / "attachments")
    errors = {
        record["custom_id"]: record
        for record in complete_lines(directory / "errors.jsonl")
        if isinstance(record.get("custom_id"), str)
    }
    return RunResults(source, directory, _places(directory / "results.jsonl"), errors)


def _places(path: Path) -> dict[str, int]:
    places: dict[str, int] = {}
    if not path.exists():
        return places
    with path.open("rb") as file:
        start = 0
        for raw in file:
            try:
                record = json.loads(raw)
            except (ValueError, RecursionError):  # torn by a kill, or still being written
                record = None
            if isinstance(record, dict) and isinstance(record.get("custom_id"), str):
                places[record["custom_id"]] = start
            start += len(raw)
    return places


def _answered(record: dict[str, Any]) -> Row:
    body, ours = record["response"]["body"], record["pipeline"]
    choices = sorted(body.get("choices") or [], key=lambda choice: choice.get("index", 0))
    usage, flags = body.get("usage") or {}, tuple(ours["flags"])
    return Row(
        custom_id=record["custom_id"],
        status="flagged" if set(flags) & set(DEFECTS) else "ok",
        pages=tuple((page["file"], page["page"]) for page in ours["pages"]),
        choices=tuple(text_of(choice) for choice in choices),
        finish_reason=choices[0].get("finish_reason") if choices else None,
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        attempts=ours["attempts"],
        flags=flags,
    )
