"""Rows of requests become rows of documents: the pages of a file, joined in their order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.results.rows import STATES, Row, RunResults


@dataclass(frozen=True, slots=True)
class DocumentRow:
    """One file: `status` is the worst of its pages', `missing_pages` have no answer."""

    file: str
    status: str
    pages: tuple[int, ...]
    text: str
    missing_pages: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int
    flags: tuple[str, ...]

    def as_record(self) -> dict[str, Any]:
        """JSON data."""
        return {
            "file": self.file,
            "status": self.status,
            "pages": list(self.pages),
            "text": self.text,
            "missing_pages": list(self.missing_pages),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "flags": list(self.flags),
        }


def document_rows(results: RunResults, separator: str = "\n\n") -> Iterator[DocumentRow]:
    """One row per file, in the order of the job; requests without pages have none.

    Of two requests for one page the first counts. Files whose requests stand together in the
    job, as `encode --job` writes them, are in memory one at a time; of others what is not yet
    complete.
    """
    left: dict[str, int] = {}
    for row in results.rows():
        if row.pages:
            left[row.pages[0][0]] = left.get(row.pages[0][0], 0) + 1
    held: dict[str, list[Row]] = {}
    for row in results.rows():
        if row.pages:
            file = row.pages[0][0]
            held.setdefault(file, []).append(row)
            left[file] = left.get(file, 1) - 1
            if left[file] <= 0:
                yield _joined(file, held.pop(file), separator)
    for file, rows in held.items():  # the job grew meanwhile
        yield _joined(file, rows, separator)


def _joined(file: str, rows: list[Row], separator: str) -> DocumentRow:
    by_page: dict[tuple[int | None, ...], Row] = {}
    for row in rows:
        by_page.setdefault(tuple(number for _, number in row.pages), row)
    kept = [by_page[pages] for pages in sorted(by_page, key=lambda pages: pages[0] or 0)]
    numbers = {row.custom_id: [number for _, number in row.pages if number] for row in kept}
    return DocumentRow(
        file=file,
        status=max((row.status for row in kept), key=STATES.index),
        pages=tuple(number for row in kept for number in numbers[row.custom_id]),
        text=separator.join(row.text for row in kept if row.text is not None),
        missing_pages=tuple(
            number for row in kept if row.text is None for number in numbers[row.custom_id]
        ),
        prompt_tokens=sum(row.prompt_tokens or 0 for row in kept),
        completion_tokens=sum(row.completion_tokens or 0 for row in kept),
        flags=tuple(sorted({flag for row in kept for flag in row.flags})),
    )
