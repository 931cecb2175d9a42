"""Which requests of a job run now: not those that are done, nor those that failed for good."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.errors import Failure, JobError
from pipeline.journal import RunDirectory
from pipeline.run.answer import Tally
from pipeline.run.quality import DEFECTS
from pipeline.run.requests import RequestMaker
from pipeline.run.survey import JobSource


@dataclass(frozen=True, slots=True)
class Choice:
    """What the caller asked for.

    `only` these custom_ids, if any; at most `limit` requests; with `retry_failed` those that
    failed for good and answers that are none, too.
    """

    only: frozenset[str] = frozenset()
    limit: int | None = None
    retry_failed: bool = False


def chosen(source: JobSource, choice: Choice, directory: RunDirectory) -> JobSource:
    """The job without the lines that are not meant; raises JobError for an unknown custom_id.

    Beyond the limit are lines that have no answer yet.
    """
    if not choice.only and choice.limit is None:
        return source
    source = replace(source, only=choice.only or None)
    beyond: set[str] = set()
    named: set[str] = set()
    room = choice.limit
    for line in source.lines():
        if line.custom_id is None:
            continue
        named.add(line.custom_id)
        state = directory.states.get(line.custom_id)
        if room is None or isinstance(line, Failure) or (state is not None and state.done):
            continue
        if room > 0:
            room -= 1
        else:
            beyond.add(line.custom_id)
    if unknown := sorted(choice.only - named):
        raise JobError(
            f"{source.path} has no request {unknown[0]!r}", "`--only` takes the job's custom_ids"
        )
    return replace(source, beyond=frozenset(beyond))


def plan(
    maker: RequestMaker, directory: RunDirectory, tally: Tally, choice: Choice, max_attempts: int
) -> dict[str, str]:
    """custom_id → identity of what has to run; answers whose request has changed are set aside.

    What failed in a way that may pass is tried `max_attempts` times, over all runs.
    """
    identities: dict[str, str] = {}
    for request in maker.requests():
        if isinstance(request, Failure):
            tally.fail(request)
            directory.fail(request, None)
        else:
            identities[request.custom_id] = request.identity
    directory.supersede(identities)
    if choice.retry_failed:
        directory.set_aside(_of_no_use(identities, directory))
    pending: dict[str, str] = {}
    tally.reused = -tally.succeeded  # those are done, too
    for custom_id, identity in identities.items():
        if directory.is_done(custom_id, identity):
            tally.reused += 1
        elif custom_id not in tally.failures:
            failure = _failure_of(custom_id, identity, directory)
            may_pass = failure is None or (failure.retryable and failure.attempts < max_attempts)
            if failure is None or may_pass or choice.retry_failed:
                pending[custom_id] = identity
            else:
                tally.fail(failure)
    if choice.limit is not None:
        pending = dict(list(pending.items())[: choice.limit])
    _note_flags(identities, directory, tally)
    for custom_id, identity in pending.items():
        tries = directory.attempts_of(custom_id, identity)
        directory.note("queued", custom_id, identity, tries)
    directory.flush()
    return pending


def _failure_of(custom_id: str, identity: str, directory: RunDirectory) -> Failure | None:
    """What this very request failed of in an earlier run."""
    record = directory.failure_of(custom_id, identity)
    try:
        failure = None if record is None else Failure.from_record(record)
    except (KeyError, ValueError, TypeError, AssertionError):  # of another version
        return None
    tries = directory.attempts_of(custom_id, identity)
    return None if failure is None else replace(failure, attempts=tries)


def _of_no_use(identities: dict[str, str], directory: RunDirectory) -> set[str]:
    return {
        custom_id
        for custom_id, identity in identities.items()
        if directory.is_done(custom_id, identity)
        and set(DEFECTS) & set(directory.flags_of(custom_id))
    }


def _note_flags(identities: dict[str, str], directory: RunDirectory, tally: Tally) -> None:
    tally.flags.clear()
    for custom_id, identity in identities.items():
        if directory.is_done(custom_id, identity):
            tally.flags.update(directory.flags_of(custom_id))
