"""Pages that another encoder has claimed come again, once they are done or it has let them go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.encode.records import Done, Only, Outcome, PutOff, Target
from pipeline.errors import Failure
from pipeline.pages import SourceFile, Wanted
from pipeline.store.claims import Claims

# (files, their wanted pages, whether documents may be put off) → what came of them
Line = Callable[[Sequence[SourceFile], Only | None, bool], Iterator[Done | Failure | PutOff]]

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0


def in_rounds(
    line: Line,
    files: Sequence[SourceFile],
    only: Only | None,
    target: Target,
    claims: Claims,
    say: Callable[[str], object],
) -> Iterator[Outcome]:
    """The outcome of every page of `files`, first of those that nobody else works on.

    Ends when all are done, by whomever; `say` is told once if that takes waiting for others.
    """
    waiting: list[PutOff] = []
    yield from _sort_out(line(files, only, True), waiting)
    wanted = {
        file.path: target.decode.pages if only is None else only.get(file.path)
        for file in files
        if waiting
    }
    told = False
    while waiting:
        ready, waiting = _split(waiting, target, claims)
        if not ready and not told:
            say(f"waiting for another process, which is encoding {len(waiting)} of the pages")
            told = True
        wait_s = _SHORTEST_WAIT_S
        while not ready:
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            ready, waiting = _split(waiting, target, claims)
        again = {each.file.path: each.file for each in ready}
        yield from _sort_out(line(list(again.values()), _pages(ready, wanted), False), waiting)


def _sort_out(
    outcomes: Iterable[Done | Failure | PutOff], waiting: list[PutOff]
) -> Iterator[Outcome]:
    for outcome in outcomes:
        if isinstance(outcome, PutOff):
            waiting.append(outcome)
        else:
            yield outcome


def _split(
    waiting: Sequence[PutOff], target: Target, claims: Claims
) -> tuple[list[PutOff], list[PutOff]]:
    """What can go on, and what another encoder still works on.

    A document as a whole goes on whatever the other one does: its pages are shared from there.
    """
    ready: list[PutOff] = []
    rest: list[PutOff] = []
    for each in waiting:
        free = each.key is None or target.store.has(each.key) or claims.is_free(each.key)
        (ready if free else rest).append(each)
    return ready, rest


def _pages(ready: Iterable[PutOff], wanted: Mapping[Path, Wanted | None]) -> Only:
    """The pages of each file that go on; of a document, those that were wanted of it."""
    numbers: dict[Path, set[int]] = {}
    for each in ready:
        found = numbers.setdefault(each.file.path, set())
        if each.page is not None:
            found.add(each.page)
    return {path: frozenset(found) if found else wanted[path] for path, found in numbers.items()}
