"""Line 1: pages → geometry → key → miss? → resize → tower → store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.encode import reading, stages
from pipeline.encode.beside import beside
from pipeline.encode.digests import Digests
from pipeline.encode.limit import FailureLimit, until_exceeded
from pipeline.encode.locate import Located, Locator
from pipeline.encode.records import (
    DEFAULT_DECODE,
    DecodeOptions,
    Done,
    EncodeReport,
    GoodPage,
    Only,
    Outcome,
    PutOff,
    Target,
    target_for,
)
from pipeline.encode.remember import remember_pages
from pipeline.encode.rounds import in_rounds
from pipeline.errors import Failure
from pipeline.memo import Memo
from pipeline.pages import Discovery, SourceFile, discover
from pipeline.store.claims import claims_in
from pipeline.store.hold import hold_shared

__all__ = [
    "DEFAULT_DECODE",
    "DecodeOptions",
    "Done",
    "EncodeReport",
    "FailureLimit",
    "GoodPage",
    "Located",
    "Locator",
    "Outcome",
    "Target",
    "encode_pages",
    "target_for",
]

Watch = Callable[[Iterator[Outcome], Discovery], Iterable[Outcome]]


def _unwatched(outcomes: Iterator[Outcome], found: Discovery) -> Iterator[Outcome]:
    return outcomes


def encode_pages(
    paths: Sequence[Path | str],
    target: Target,
    *,
    only: Only | None = None,
    watch: Watch = _unwatched,
    threads: int | None = None,
    limit: FailureLimit | None = None,
    memo: Memo | None = None,
    say: Callable[[str], object] = lambda message: None,
) -> EncodeReport:
    """Bring the embedding of every page in `paths` into the cache, a few pages in memory at a time.

    `only` restricts files to some of their pages. `watch` wraps the stream of outcomes, for a
    progress bar; the files come with it. The tower is loaded at the first page that the cache
    lacks, and computes with `threads`, default one per physical core. What is stored for a page
    does not depend on the other pages of the call. Once there are more failures than `limit`
    allows, the call ends with what is done so far. The cache is held shared meanwhile; pages that
    another process is encoding are left to it, and counted once they are there. `say` is told if
    that takes waiting. What a `memo` knows of a file is not read again.

    Raises StoreError where the cache can't be written, CheckpointError where the tower can't be
    loaded; a page that fails is an item of the report.
    """
    started = time.monotonic()
    found = discover(paths)  # files in stable order, type by content
    tower = stages.TowerAtHand(target, threads)
    memo = memo or Memo(None)
    digests = Digests(memo)
    with hold_shared(target.store.root, say=say), claims_in(target.store.root) as claims:

        def line(
            files: Sequence[SourceFile], only: Only | None, put_off: bool
        ) -> Iterator[Outcome | PutOff]:
            documents = reading.digest_files(files, digests)
            read = reading.read_pages(documents, target, only, claims, put_off=put_off)
            placed = stages.place(read, target)  # grid and key
            missed = stages.look_up(placed, target.store, claims)
            resized = stages.resize(missed, target, claims)
            ahead = beside(resized)  # those above work in a thread
            encoded = stages.run_tower(ahead, tower, target.store, claims)
            return stages.put(encoded, target.store, claims)

        stored = in_rounds(line, found.files, only, target, claims, say)
        limited = until_exceeded(stored, found, limit)
        outcomes = [*found.failures, *watch(limited, found)]
    report = _report(outcomes, found, time.monotonic() - started)
    whole = only is None and target.decode.pages is None
    if whole and not (limit and limit.exceeded(report.pages, report.failed)):
        remember_pages(memo, target, found, outcomes, digests)
    return report


def _report(outcomes: list[Outcome], found: Discovery, seconds: float) -> EncodeReport:
    places = {file.path: number for number, file in enumerate(found.files)}
    outcomes.sort(key=lambda each: _place(each, places))  # some were put off
    failures = tuple(outcome for outcome in outcomes if isinstance(outcome, Failure))
    done = [outcome for outcome in outcomes if isinstance(outcome, Done)]
    encoded = [page for page in done if page.stored_bytes is not None]
    return EncodeReport(
        pages=len(outcomes),
        encoded=len(encoded),
        cached=len(done) - len(encoded),
        failed=len(failures),
        skipped=found.skipped,
        seconds=seconds,
        megapixels=sum(page.pixels for page in encoded) / 1e6,
        tokens=sum(page.tokens for page in encoded),
        bytes=sum(page.stored_bytes or 0 for page in encoded),
        failures=failures,
        good=tuple(
            GoodPage(page.file.path, page.page, page.file.paged, page.key, page.tokens)
            for page in done
        ),
    )


def _place(outcome: Outcome, places: Mapping[Path, int]) -> tuple[int, int]:
    """Where an outcome stands: by file, then by page; what is wrong with a whole file first."""
    path = outcome.file.path if isinstance(outcome, Done) else Path(outcome.file or "")
    return places.get(path, -1), outcome.page or 0
