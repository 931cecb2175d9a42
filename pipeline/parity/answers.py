"""Greedy answers of a real engine, token by token, and where two of them part."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from pipeline.config import EngineOptions
from pipeline.engines.arguments import ModelSource
from pipeline.engines.supervisor import SetAside, supervise
from pipeline.errors import PipelineError
from pipeline.jobs import Request, Result
from pipeline.run.line import engine_of


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer: its token ids and at each the log-probabilities of the best two."""

    text: str
    token_ids: tuple[int, ...]
    top_two: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which two answers part; margin = the top-2 log-probability gap there."""

    custom_id: str
    position: int
    native: str
    cached: str
    margin: float
    engine: str


def ask(
    source: ModelSource,
    options: EngineOptions,
    requests: Iterator[Request],
    work: Path,
    *,
    name: str,
    total: int,
    quiet: bool,
) -> dict[str, Answer]:
    """Every request's answer by custom_id; logs go to `work`, `name` stands at the bar.

    Raises PipelineError if the engine rejects a request.
    """
    engine = engine_of(options, source, work, work / "engine.json")
    answers: dict[str, Answer] = {}
    with (
        tqdm(desc=name, unit="request", total=total, disable=quiet or None) as bar,
        closing(supervise(engine, requests)) as events,
    ):
        for event in events:
            if isinstance(event, Result):
                answers[event.custom_id] = answer_of(event)
                bar.update()
            elif isinstance(event, SetAside):
                raise PipelineError(f"{event.request.custom_id}: {event.cause}", name)
    return answers


def answer_of(result: Result) -> Answer:
    """The answer in a chat completion; raises PipelineError if there is none."""
    if result.status_code != 200 or result.body is None:
        raise PipelineError(f"{result.custom_id}: the engine said: {result.error}")
    (choice,) = result.body["choices"]
    tops = (
        tuple(top["logprob"] for top in token["top_logprobs"])
        for token in choice["logprobs"]["content"]
    )
    return Answer(choice["message"]["content"], tuple(choice["token_ids"]), tuple(tops))


def difference(custom_id: str, native: Answer, cached: Answer, engine: str) -> Difference | None:
    """Where two answers part, or None if they are the same to the last token."""
    if native.token_ids == cached.token_ids:
        return None
    pairs = zip(native.token_ids, cached.token_ids, strict=False)
    shorter = min(len(native.token_ids), len(cached.token_ids))
    position = next((at for at, (a, b) in enumerate(pairs) if a != b), shorter)
    longer = native if position < len(native.top_two) else cached
    best = sorted(longer.top_two[position], reverse=True)
    margin = best[0] - best[1] if len(best) > 1 else math.inf
    return Difference(custom_id, position, native.text, cached.text, margin, engine)
