"""The options of `encode` that write a job of the pages."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import Command
from pipeline.errors import UsageError

if TYPE_CHECKING:
    from pipeline.encode import EncodeReport

_LIKE_A_FILE = re.compile(r"\S+\.(txt|md|prompt|jinja|j2)")


def job_options(command: Command) -> Command:
    """--job and what belongs to it."""
    decorators = (
        click.option(
            "--job",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help="Also write the pages as a job file.",
        ),
        click.option(
            "--prompt", metavar="TEXT|FILE", help="The job's prompt, or a file that holds it."
        ),
        click.option(
            "--max-tokens",
            type=click.IntRange(min=1),
            default=1024,
            show_default=True,
            metavar="N",
            help="The job's limit of tokens per answer.",
        ),
        click.option(
            "--schema",
            type=click.Path(path_type=Path, exists=True, dir_okay=False),
            metavar="FILE",
            help="JSON schema that the job's answers must follow.",
        ),
        click.option(
            "--pages-per-request",
            type=click.IntRange(min=1),
            default=1,
            show_default=True,
            metavar="N",
            help="Consecutive pages of a file in one request of the job.",
        ),
    )
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The job that is asked for."""

    path: Path
    prompt: str
    max_tokens: int
    schema: dict[str, Any] | None
    pages_per_request: int

    def write(self, report: EncodeReport, roots: tuple[Path, ...], model_name: str) -> int:
        """Write the job of the good pages and return the number of its lines."""
        from pipeline.jobs import JobImage, write_job

        return write_job(
            self.path,
            (JobImage(page.path, page.page, page.paged) for page in report.good),
            inputs=list(roots),
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            schema=self.schema,
            pages_per_request=self.pages_per_request,
            model_name=model_name,
        )


def job_plan(
    job: Path | None,
    prompt: str | None,
    max_tokens: int,
    schema: Path | None,
    pages_per_request: int,
) -> JobPlan | None:
    """The plan, None without `--job`; raises UsageError or JobError for one that can't be meant."""
    if job is None:
        if prompt is not None or schema is not None:
            given = "--prompt" if schema is None else "--schema"
            raise UsageError(f"`{given}` belongs to a job", "add `--job FILE`, or leave it out")
        return None
    if prompt is None:
        raise UsageError("`--job` needs a prompt", "add `--prompt TEXT` or `--prompt FILE`")
    from pipeline.jobs import check_job_path

    check_job_path(job)
    answer_schema = None if schema is None else _schema_of(schema)
    return JobPlan(job, text_of(prompt), max_tokens, answer_schema, pages_per_request)


def text_of(prompt: str) -> str:
    """The prompt itself, or the content of the file that it names.

    Raises UsageError for what looks like the name of a file and is none.
    """
    try:
        is_file = Path(prompt).is_file()
    except (OSError, ValueError):  # too long for a name: it is the prompt
        return prompt
    try:
        if is_file:
            return Path(prompt).read_text(encoding="utf-8-sig").strip()
        if _LIKE_A_FILE.fullmatch(prompt):
            raise UsageError(f"there is no prompt file `{prompt}`", "check the name")
        prompt.encode()  # what a command line can't decode comes as lone surrogates
    except (OSError, ValueError) as error:
        message = f"can't read the prompt `{prompt}`: {error}"
        raise UsageError(message, "it must be UTF-8") from error
    return prompt


def _schema_of(path: Path) -> dict[str, Any]:
    from pipeline.keys import canonical_json

    try:
        schema = json.loads(path.read_text(encoding="utf-8-sig"))
        canonical_json(schema)  # refuses what a job line can't hold: NaN, lone surrogates
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"can't read the schema `{path}`: {error}") from error
    if not isinstance(schema, dict):
        raise UsageError(f"the schema `{path}` is no JSON object")
    return schema
