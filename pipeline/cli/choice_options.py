"""The options of `run` that say which requests, how often, and until when."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import click

Command = Callable[..., Any]


class Moment(click.ParamType):
    """A time of day, the next one of that name, or a date with a time: local time."""

    name = "TIME"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        if isinstance(value, datetime):
            return value
        text = str(value).strip()
        try:
            if re.fullmatch(r"\d{1,2}:\d\d", text):
                hour, minute = map(int, text.split(":"))
                now = datetime.now()
                moment = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
                return moment if moment > now else moment + timedelta(days=1)
            moment = datetime.fromisoformat(text)
        except ValueError:
            self.fail(f"{value!r} is no time; examples: 06:00, 2026-12-01T06:00", param, ctx)
        return moment.astimezone().replace(tzinfo=None)


_OPTIONS = (
    click.option("--only", multiple=True, metavar="ID", help="Only this custom_id; repeatable."),
    click.option(
        "--limit", type=click.IntRange(min=1), metavar="N", help="At most N requests this time."
    ),
    click.option(
        "--retry-failed",
        is_flag=True,
        help="Also what failed for good, and answers that loop or are no valid JSON.",
    ),
    click.option(
        "--max-attempts", type=click.IntRange(min=1), default=3, show_default=True, metavar="N",
        help="Tries of a request whose error may pass, over all nights.",
    ),
    click.option(
        "--retries", type=click.IntRange(min=0), default=2, show_default=True, metavar="N",
        help="How often an answer that is none is asked for again.",
    ),
    click.option(
        "--more-tokens", is_flag=True,
        help="Ask for a text cut off at max_tokens again, with twice.",
    ),
    click.option("--until", type=Moment(), help="Stop then: 06:00 is the next one."),
    click.option(
        "--max-hours", type=click.FloatRange(0, min_open=True), metavar="HOURS",
        help="Stop after so long.",
    ),
    click.option(
        "--wait", "wait_s", type=click.FloatRange(0), default=0, metavar="SECONDS",
        help="Wait for another run of the job to end.",
    ),
)  # fmt: skip


def choice_options(command: Command) -> Command:
    """--only, --limit, --retry-failed, --max-attempts, --retries, --until and the like."""
    for decorate in reversed(_OPTIONS):
        command = decorate(command)
    return command


def choice_of(values: dict[str, Any]) -> dict[str, Any]:
    """Take these options out of a command's arguments, as fields of `RunOptions`."""
    from pipeline.run.answer import Persistence
    from pipeline.run.choice import Choice
    from pipeline.run.ladder import Ladder

    until, hours = values.pop("until"), values.pop("max_hours")
    limits = [] if hours is None else [hours * 3600]
    if until is not None:
        limits.append((until - datetime.now()).total_seconds())
    ladder = Ladder(values.pop("retries"), values.pop("more_tokens"))
    return {
        "choice": Choice(
            frozenset(values.pop("only")), values.pop("limit"), values.pop("retry_failed")
        ),
        "persistence": Persistence(ladder, values.pop("max_attempts")),
        "limit_s": min(limits, default=None),
        "wait_s": values.pop("wait_s"),
    }
