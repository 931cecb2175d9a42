"""How many failures are too many: a call that has more ends early."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pipeline.encode.records import Outcome
from pipeline.errors import Failure, UsageError
from pipeline.pages import Discovery

MIN_PAGES = 20  # fewer say nothing about a share


@dataclass(frozen=True, slots=True)
class FailureLimit:
    """More failures than `count` are too many, or more than `percent` of the pages."""

    count: int | None = None
    percent: float | None = None

    @classmethod
    def parse(cls, text: str) -> FailureLimit:
        """`10` or `5%`; raises UsageError."""
        found = re.fullmatch(r"([0-9]{1,9})|([0-9]{1,3}(?:\.[0-9]{1,6})?)%", text)
        if found is None or (found[2] and float(found[2]) > 100):
            message = f"`--max-failures {text}` is no number of pages and no percentage"
            raise UsageError(message, "give one like `10` or `5%`")
        return cls(count=int(found[1])) if found[1] else cls(percent=float(found[2]))

    def exceeded(self, pages: int, failed: int, announced: int = 0) -> bool:
        """True if `failed` of `pages` are too many.

        `announced` is how many pages there will be at least: the first pages of a large call may
        come from its one bad directory.
        """
        if self.percent is None:
            return failed > (self.count or 0)
        return pages >= MIN_PAGES and failed * 100 > self.percent * max(pages, announced)


def until_exceeded(
    outcomes: Iterable[Outcome], found: Discovery, limit: FailureLimit | None
) -> Iterator[Outcome]:
    """The outcomes up to the failure that is one too many; those of `found` come before them."""
    pages = failed = len(found.failures)
    announced = pages + len(found.files)
    if limit is not None and limit.exceeded(pages, failed, announced):
        return
    for outcome in outcomes:
        yield outcome
        pages += 1
        failed += isinstance(outcome, Failure)
        if limit is not None and limit.exceeded(pages, failed, announced):
            return
