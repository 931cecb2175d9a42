"""Line 2 in one function, and its stages."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pipeline.config import EngineOptions
from pipeline.engines import guard
from pipeline.engines.arguments import ModelSource
from pipeline.engines.contract import Engine, EngineStarted
from pipeline.engines.llm import LlmEngine
from pipeline.engines.run_batch import RunBatchEngine
from pipeline.engines.supervisor import Death, SetAside, supervise
from pipeline.errors import Failure, JobError
from pipeline.jobs import Request, Result
from pipeline.journal import RunDirectory, open_run_directory
from pipeline.run.images import PageOptions, locate_images, open_pages
from pipeline.run.outcome import DamagedEntry, outcome_of, set_aside_failure
from pipeline.run.requests import RequestMaker
from pipeline.run.survey import JobSource, Survey, survey_job

REPAIRS = 1  # how often a damaged cache entry is made anew within one run


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What `pipeline run` was asked for."""

    job: Path
    pages: PageOptions
    engine: EngineOptions
    base: Path | None = None
    roots: tuple[Path, ...] = ()
    served_name: str | None = None
    encode: bool = True
    strict: bool = False
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class RunReport:
    """Totals; requests = succeeded + reused + failed + expired, unless stopped early."""

    requests: int
    succeeded: int
    reused: int
    failed: int
    expired: int
    prompt_tokens: int
    completion_tokens: int
    engine_starts: int
    seconds: float
    failures: tuple[Failure, ...]
    stopped: bool

    def as_record(self) -> dict[str, Any]:
        """The `run --json` record."""
        record = asdict(self)
        del record["failures"], record["stopped"]
        return record | {"seconds": round(self.seconds, 1)}


@dataclass(slots=True)
class _Tally:
    """Counts of the run so far; failures by custom_id, or by their text where there is none."""

    total: int
    succeeded: int = 0
    reused: int = 0
    engine_starts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failures: dict[str, Failure] = field(default_factory=dict)
    stopped: bool = False

    def fail(self, failure: Failure) -> None:
        self.failures[failure.custom_id or failure.detail] = failure


def run_directory_of(job: Path) -> Path:
    """`jobs/nightly.jsonl` runs in `jobs/nightly.run/`."""
    return job.with_suffix(".run")


def run_job(options: RunOptions) -> RunReport:
    """Run a job to its end: every line ends as an answer in results.jsonl or as a failure.

    Raises JobError for a job that can't be run as a whole, LockedError while another run has
    it, EngineLostError if the engine can't be kept alive; finished answers are kept each time.
    """
    started = time.monotonic()
    with open_run_directory(run_directory_of(options.job)) as directory:
        guard.end_leftovers(directory.engine_record)
        source = _source(options, directory)
        survey = survey_job(source)
        _refuse_bad_lines(survey, options)
        pages = open_pages(options.pages)
        names = served_names(options.served_name, pages.model_names, survey)
        engine = make_engine(options.engine, directory, pages.engine_source(names))
        tally = _Tally(survey.requests)
        try:
            for _ in range(1 + REPAIRS):
                images = locate_images(survey.images, pages, options.encode, options.quiet)
                maker = RequestMaker(source, images, names, pages.model_identity)
                pending = plan(maker, directory, tally)
                damaged = answer(engine, maker, pending, directory, tally, options.quiet)
                if not damaged:
                    break
                pages.quarantine(damaged)
        except KeyboardInterrupt:
            tally.stopped = True
        finally:
            directory.write_errors(tally.failures.values())
        report = _report(tally, time.monotonic() - started)
        directory.write_report(report.as_record())
        return report


def plan(maker: RequestMaker, directory: RunDirectory, tally: _Tally) -> set[str]:
    """custom_ids that still have to run; answers whose request has changed are set aside."""
    identities: dict[str, str] = {}
    for request in maker.requests():
        if isinstance(request, Failure):
            tally.fail(request)
            directory.fail(request, None)
        else:
            identities[request.custom_id] = request.identity
    directory.supersede(identities)
    done = {name for name, identity in identities.items() if directory.is_done(name, identity)}
    tally.reused = len(done) - tally.succeeded
    pending = identities.keys() - done - tally.failures.keys()
    for custom_id, identity in identities.items():
        if custom_id in pending:
            tries = directory.attempts_of(custom_id, identity)
            directory.note("queued", custom_id, identity, tries)
    directory.flush()
    return pending


def answer(
    engine: Engine,
    maker: RequestMaker,
    pending: set[str],
    directory: RunDirectory,
    tally: _Tally,
    quiet: bool,
) -> list[DamagedEntry]:
    """Drive the pending requests through the engine and keep what becomes of each.

    Returns the cache entries that the engine refused; their requests are still pending.
    """
    handed: dict[str, Request] = {}
    damaged: list[DamagedEntry] = []
    total = tally.total
    requests = _hand_out(maker, pending, directory, handed)
    off = quiet or None  # None: shown on a terminal only
    if pending and not quiet:
        tqdm.write(f"starting vLLM; its log goes to {directory.attempts}/", file=sys.stderr)
    with (
        tqdm(total=total, initial=total - len(pending), unit="request", disable=off) as bar,
        closing(supervise(engine, requests)) as events,
    ):
        for event in events:
            if isinstance(event, EngineStarted):
                tally.engine_starts += 1
                directory.note_engine("engine_start", towers=event.towers, log=event.log)
                if not quiet:
                    _say_tower(event)
            elif isinstance(event, Death):
                _note_death(event, directory)
            else:
                bad = _keep(event, handed, directory, tally)
                damaged += [bad] if bad else []
                bar.update()
    return damaged


def _hand_out(
    maker: RequestMaker, pending: set[str], directory: RunDirectory, handed: dict[str, Request]
) -> Iterator[Request]:
    for request in maker.requests():
        if isinstance(request, Request) and request.custom_id in pending:
            handed[request.custom_id] = request
            _note_start(request, directory)
            yield request


def _note_start(request: Request, directory: RunDirectory) -> None:
    attempt = directory.attempts_of(request.custom_id, request.identity) + 1
    directory.note("started", request.custom_id, request.identity, attempt)


def _note_death(death: Death, directory: RunDirectory) -> None:
    tqdm.write(
        f"engine died: {death.cause} (log `{death.log}`); "
        f"{len(death.unfinished)} unfinished requests run again",
        file=sys.stderr,
    )
    directory.note_engine("engine_death", cause=death.cause, log=death.log)
    for request in death.unfinished:
        _note_start(request, directory)


def _keep(
    event: Result | SetAside, handed: dict[str, Request], directory: RunDirectory, tally: _Tally
) -> DamagedEntry | None:
    """Make one finished request durable."""
    custom_id = event.request.custom_id if isinstance(event, SetAside) else event.custom_id
    request = handed.pop(custom_id)
    attempts = directory.attempts_of(custom_id, request.identity)
    if isinstance(event, SetAside):
        outcome: dict[str, Any] | Failure | DamagedEntry = set_aside_failure(event, attempts)
    else:
        outcome = outcome_of(event, request, attempts)
    if isinstance(outcome, Failure):
        tally.fail(outcome)
        directory.fail(outcome, request.identity)
    elif isinstance(outcome, DamagedEntry):
        return outcome
    else:
        directory.finish(outcome)
        tally.succeeded += 1
        usage = outcome["response"]["body"].get("usage") or {}
        tally.prompt_tokens += usage.get("prompt_tokens") or 0
        tally.completion_tokens += usage.get("completion_tokens") or 0
    return None


def make_engine(options: EngineOptions, directory: RunDirectory, model: ModelSource) -> Engine:
    """The driver that the options name."""
    drivers: dict[str, type[LlmEngine] | type[RunBatchEngine]] = {
        "llm": LlmEngine,
        "run-batch": RunBatchEngine,
    }
    return drivers[options.driver](model, options, directory.attempts, directory.engine_record)


def served_names(
    given: str | None, model_names: tuple[str, ...], survey: Survey
) -> tuple[str, ...]:
    """Names under which the model answers; the first one stands in the responses.

    A job that names one model throughout is served under that name: the same checkpoint has
    other names on other machines.
    """
    if given is not None:
        return (given,)
    if len(survey.model_names) == 1:
        return survey.model_names
    return model_names


def _source(options: RunOptions, directory: RunDirectory) -> JobSource:
    base = options.base or options.job.parent
    roots = options.roots or (base, Path.cwd())
    return JobSource(options.job, base, roots, directory.attachments)


def _refuse_bad_lines(survey: Survey, options: RunOptions) -> None:
    if options.strict and survey.failures:
        raise JobError(
            f"{len(survey.failures)} bad lines, the first: {survey.failures[0].detail}",
            "without --strict the other lines run",
        )


def _say_tower(started: EngineStarted) -> None:
    tower = started.towers[0]
    tqdm.write(
        f"engine ready; vision tower: {tower['class']}, {tower['parameters']} parameters",
        file=sys.stderr,
    )


def _report(tally: _Tally, seconds: float) -> RunReport:
    return RunReport(
        requests=tally.total,
        succeeded=tally.succeeded,
        reused=tally.reused,
        failed=len(tally.failures),
        expired=0,
        prompt_tokens=tally.prompt_tokens,
        completion_tokens=tally.completion_tokens,
        engine_starts=tally.engine_starts,
        seconds=seconds,
        failures=tuple(tally.failures.values()),
        stopped=tally.stopped,
    )
