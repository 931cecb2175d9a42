"""The `pipeline` command: a table of commands, and the one place that turns errors into exits.

Command modules are imported when their command is called, so that `--help` needs only click.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
from typing import Any, NoReturn

import click

from pipeline import __version__
from pipeline.errors import ExitCode, PipelineError

# name → (module:function, summary); the order is that of the help page
COMMANDS: dict[str, tuple[str, str]] = {
    "pages": ("pipeline.cli.pages:pages", "List the pages that would be encoded."),
    "model": ("pipeline.cli.model:model", "Show what is known of a model."),
    "encode": ("pipeline.cli.encode:encode", "Put the embeddings of page images into the cache."),
    "run": ("pipeline.cli.run:run", "Run a job through vLLM on cached embeddings."),
    "results": ("pipeline.cli.results:results", "Write a job's answers in the order of the job."),
    "parity": ("pipeline.cli.parity:parity", "Compare cached embeddings with native images."),
    "golden": ("pipeline.cli.golden:golden", "Record answers, check them before an upgrade."),
    "emit": ("pipeline.cli.emit:emit", "Write a job with its embeddings, for another machine."),
    "cache": ("pipeline.cli.cache:cache", "Look after the embedding cache."),
    "nightly": ("pipeline.cli.nightly:nightly", "Encode and run, as cron calls it."),
}


class CommandTable(click.Group):
    """A group that imports a command only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if _is_there(name)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS or not _is_there(cmd_name):
            return None
        module, _, function = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), function)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> Any:
        _open_standard_streams()
        try:
            return super().invoke(ctx)
        except PipelineError as error:
            _leave(error.message, error.hint, error.exit_code)
        except KeyboardInterrupt:
            hint = "the same command goes on where this one stopped"
            _leave("stopped by a signal", hint, ExitCode.STOPPED)
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of our output has gone; click ends quietly
                raise
            where = "" if error.filename is None else f"`{error.filename}`: "
            _leave(f"{where}{error.strerror or error}", "", ExitCode.ERROR)


def _is_there(name: str) -> bool:
    """True if the command's module is part of this version."""
    module = COMMANDS[name][0].partition(":")[0]
    return importlib.util.find_spec(module) is not None


def _open_standard_streams() -> None:
    """A closed descriptor 0, 1 or 2 would go to the next file opened, and messages into it."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _leave(message: str, hint: str, code: ExitCode) -> NoReturn:
    click.echo(f"Error: {message}" + (f"\n\nhint: {hint}" if hint else ""), err=True)
    raise SystemExit(int(code))


@click.group(cls=CommandTable, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pipeline")
def main() -> None:
    """Offline batch inference of document pages with vision-language models.

    Pages are encoded once on the CPU; vLLM then reads the embeddings, its vision tower unloaded.

    \b
    Example:
      pipeline encode docs/ --job jobs/pages.jsonl --prompt "Read the page."
      pipeline run jobs/pages.jsonl
    """
