"""Line 2 in one function, and its stages."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeline.config import EngineOptions, cpu_build_installed
from pipeline.encode import Located
from pipeline.engines import guard
from pipeline.engines.arguments import ModelSource
from pipeline.engines.contract import Engine
from pipeline.engines.llm import LlmEngine
from pipeline.engines.memory import for_hybrid, for_pages
from pipeline.engines.replicas import share_of
from pipeline.engines.run_batch import RunBatchEngine
from pipeline.errors import Failure, JobError, UsageError
from pipeline.journal import RunDirectory, open_run_directory
from pipeline.run.answer import Answering, Persistence, Tally, answer
from pipeline.run.apart import call_apart
from pipeline.run.choice import Choice, chosen, plan
from pipeline.run.images import OpenPages, PageOptions, locate_images, open_pages
from pipeline.run.inline import InlineForm, inline_faults
from pipeline.run.outcome import DamagedEntry
from pipeline.run.requests import RequestMaker
from pipeline.run.stop import Stop
from pipeline.run.survey import JobSource, Survey, survey_job
from pipeline.store.hold import hold_shared

REPAIRS = 1  # how often a damaged cache entry is made anew within one run


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What `pipeline run` was asked for: to stop after `limit_s`, to wait `wait_s` for the lock."""

    job: Path
    pages: PageOptions
    engine: EngineOptions
    base: Path | None = None
    roots: tuple[Path, ...] = ()
    served_name: str | None = None
    encode: bool = True
    strict: bool = False
    quiet: bool = False
    choice: Choice = field(default_factory=Choice)
    persistence: Persistence = field(default_factory=Persistence)
    limit_s: float | None = None
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunReport:
    """Totals; requests = succeeded + reused + failed + expired.

    `expired` are left for the next run; `flagged` counts by flag what stands against answers,
    `retried` the answers that were asked for again. `stopped` says why, if it ended early.
    """

    requests: int
    succeeded: int
    reused: int
    failed: int
    expired: int
    prompt_tokens: int
    completion_tokens: int
    engine_starts: int
    seconds: float
    retried: int
    flagged: dict[str, int]
    failures: tuple[Failure, ...]
    stopped: str

    def as_record(self) -> dict[str, Any]:
        """The `run --json` record."""
        record = asdict(self)
        del record["failures"], record["stopped"]
        return record | {"seconds": round(self.seconds, 1)}


def run_directory_of(job: Path) -> Path:
    """`jobs/nightly.jsonl` runs in `jobs/nightly.run/`; another ending stays in the name."""
    return job.with_suffix(".run") if job.suffix == ".jsonl" else job.with_name(f"{job.name}.run")


def run_job(options: RunOptions) -> RunReport:
    """Run a job to its end: every line ends as an answer in results.jsonl or as a failure.

    Asked to stop, it ends early; the same call goes on. Raises JobError for a job that can't be
    run as a whole, LockedError while another run has it, EngineLostError if the engine can't be
    kept alive; finished answers are kept each time.
    """
    started = time.monotonic()
    _check_job_file(options.job)
    cache = hold_shared(options.pages.cache, say=_say)  # no entry goes while its page is answered
    stop = Stop(options.limit_s)
    opened = open_run_directory(run_directory_of(options.job), options.wait_s)
    with stop.listening(), opened as directory, cache:
        end_engines(directory)
        source = JobSource.of(options.job, options.base, options.roots, directory.attachments)
        source = chosen(source, options.choice, directory)
        survey = survey_job(source)
        _refuse_bad_lines(survey, options)
        tally = Tally(survey.requests + len(source.beyond))
        try:
            _answer_all(options, source, survey, directory, tally, stop)
        except KeyboardInterrupt:
            tally.stopped = True
        finally:
            directory.write_errors(tally.failures.values())
        tally.stopped |= tally.left > 0
        report = _report(tally, time.monotonic() - started, stop.reason)
        directory.write_report(report.as_record())
        return report


def _answer_all(
    options: RunOptions,
    source: JobSource,
    survey: Survey,
    directory: RunDirectory,
    tally: Tally,
    stop: Stop,
) -> None:
    pages = open_pages(options.pages)
    names = served_names(options.served_name, pages.model_names, survey)
    model = pages.engine_source(names)
    make_engines(options.engine, directory, model)  # refuses what can't be meant
    faults = faults_of_inline(source, survey, pages)
    for round_ in range(1 + REPAIRS):
        images = locate_images(survey.images, pages, options.encode, options.quiet, "run")
        maker = RequestMaker(source, images, names, pages, faults)
        pending = plan(maker, directory, tally, options.choice, options.persistence.max_attempts)
        found = [place for place in images.values() if isinstance(place, Located)]
        largest = max((place.footer.rows for place in found), default=0)
        model = replace(model, largest_page_tokens=largest)
        engines = make_engines(options.engine, directory, model)
        answering = Answering(maker, pending, directory, tally, options.persistence, stop)
        try:
            damaged = answer(engines, answering, options.quiet, lambda: end_engines(directory))
        finally:
            expire(pending, directory, stop)
        pages.quarantine(damaged)
        if round_ == REPAIRS:
            give_up(damaged, directory, tally)
        if not damaged or stop.asked():
            return


def expire(pending: dict[str, str], directory: RunDirectory, stop: Stop) -> None:
    """Note what a stopped run has left undone."""
    if stop.asked():
        for custom_id, identity in pending.items():
            tries = directory.attempts_of(custom_id, identity)
            directory.note("expired", custom_id, identity, tries)
        directory.flush()


def give_up(damaged: list[DamagedEntry], directory: RunDirectory, tally: Tally) -> None:
    """Fail requests whose cache entries were refused again after they were made anew."""
    for entry in damaged:
        request = entry.request
        failure = entry.as_failure(directory.attempts_of(request.custom_id, request.identity))
        tally.fail(failure)
        directory.fail(failure, request.identity)


def faults_of_inline(source: JobSource, survey: Survey, pages: OpenPages) -> dict[str, str]:
    """What is wrong with the embeddings that lines bring along; looked into by a process apart."""
    if not survey.brings_embeddings:
        return {}
    target = pages.target
    width = target.family.row_width(target.model.config)
    form = InlineForm(target.family.delivery, width, target.spec.geometry)
    return call_apart(inline_faults, source, form)


def end_engines(directory: RunDirectory) -> None:
    """End what is left of engines that this or an earlier run has started."""
    for record in directory.path.glob("engine*.json"):
        guard.end_leftovers(record)


def make_engines(
    options: EngineOptions, directory: RunDirectory, model: ModelSource
) -> list[Engine]:
    """The engines of a run, with their logs in the run directory."""
    return [
        engine_of(
            options,
            model,
            directory.attempts,
            directory.path / ("engine.json" if number == 0 else f"engine-{number}.json"),
            share_of(number, options.replicas, options.gpus, cpu=cpu_build_installed()),
        )
        for number in range(options.replicas)
    ]


def engine_of(
    options: EngineOptions,
    model: ModelSource,
    attempts: Path,
    record: Path,
    share: Mapping[str, str] = MappingProxyType({}),
) -> Engine:
    """The driver that the options name; raises UsageError if it can't serve the model so."""
    if not model.native and not model.prompt_embeds:
        options = for_pages(options, model.largest_page_tokens)
    if model.hybrid:
        options = for_hybrid(options, cpu=cpu_build_installed())
    if model.prompt_embeds and not model.native and options.driver == "run-batch":
        raise UsageError(
            "vLLM's batch runner can't be handed this model's embeddings: its class takes none, "
            "so they go into the prompt, which only `--engine llm` builds",
            "leave out `--engine run-batch`",
        )
    if options.driver == "run-batch":
        return RunBatchEngine(model, options, attempts, record)
    return LlmEngine(model, options, attempts, record, share)


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


def _say(message: str) -> None:
    print(message, file=sys.stderr)


def _check_job_file(job: Path) -> None:
    """Before anything is created beside it."""
    if not job.is_file():
        raise JobError(
            f"there is no job file `{job}`",
            "`pipeline encode PATH --job FILE --prompt TEXT` writes one",
        )


def _refuse_bad_lines(survey: Survey, options: RunOptions) -> None:
    if options.strict and survey.failures:
        raise JobError(
            f"{len(survey.failures)} bad lines, the first: {survey.failures[0].detail}",
            "without --strict the other lines run",
        )


def _report(tally: Tally, seconds: float, reason: str) -> RunReport:
    return RunReport(
        requests=tally.total,
        succeeded=tally.succeeded,
        reused=tally.reused,
        failed=len(tally.failures),
        expired=tally.left,
        prompt_tokens=tally.prompt_tokens,
        completion_tokens=tally.completion_tokens,
        engine_starts=tally.engine_starts,
        seconds=seconds,
        retried=tally.retried,
        flagged=dict(sorted(tally.flags.items())),
        failures=tuple(tally.failures.values()),
        stopped=(reason or "limit") if tally.stopped else "",
    )
