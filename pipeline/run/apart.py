"""Call a function in a process of its own, whose memory goes with it when it ends."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from pipeline.errors import PipelineError
from pipeline.parent import die_with_parent

T = TypeVar("T")

_LEAVE_S = 10.0


def call_apart(function: Callable[..., T], *arguments: Any) -> T:
    """`function(*arguments)` in a spawned process that dies with this one, or before it.

    Function, arguments and value must be picklable. Raises the PipelineError that the function
    raises, or one of its own if the process dies without a word.
    """
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(send, function, arguments), daemon=True)
    process.start()
    send.close()
    try:
        outcome = receive.recv()
        process.join(_LEAVE_S)  # it clears up behind itself; killed, Python would warn of leaks
    except EOFError as error:
        process.join()
        raise PipelineError(
            f"the process that encodes pages ended with status {process.exitcode}",
            "out of memory? finished pages are in the cache; the same command goes on from there",
        ) from error
    finally:
        process.kill()
        process.join()
    if isinstance(outcome, PipelineError):
        raise outcome
    value: T = outcome
    return value


def _call(send: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    try:
        outcome = function(*arguments)
    except PipelineError as error:
        outcome = error
    send.send(outcome)
