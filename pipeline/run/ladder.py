"""How often, and how otherwise, an answer that is none is asked for again.

1. Cut off at `max_tokens`: twice as many, once; for plain text only if asked for.
2. Stuck in a loop, a run of blanks, or JSON that does not validate: with temperature 0.3, then
   0.7, and vLLM's own `repetition_detection` after a loop.
3. Empty: the same again, once; a blank page stays empty.

The last answer that is good is kept; failing that the best one, with what is wrong as flags. All
others stay in `attempts/answers.jsonl`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.run.quality import DEFECTS, flags_of

TEMPERATURES = (0.3, 0.7)
# a period of up to 64 tokens sixty times and more: no table that a page holds
REPETITION_DETECTION = {"max_pattern_size": 64, "min_pattern_size": 1, "min_count": 60}
_TOKEN_LIMITS = ("max_completion_tokens", "max_tokens")

Changes = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ladder:
    """How far up: `retries` after the first try; `more_tokens` for plain text, too."""

    retries: int = 2
    more_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Try:
    """One answer: its result line, what was wrong with it, and how it was asked for."""

    record: dict[str, Any]
    flags: tuple[str, ...]
    changes: Changes

    def as_record(self) -> dict[str, Any]:
        """For the `tries` of the answer that is kept."""
        body = self.record["response"]["body"]
        return {
            "flags": list(self.flags),
            "finish_reasons": [choice.get("finish_reason") for choice in body["choices"]],
            "completion_tokens": (body.get("usage") or {}).get("completion_tokens"),
            "changes": self.changes,
        }


@dataclass(slots=True)
class Climb:
    """The tries of one request so far."""

    asked: Mapping[str, Any]
    tries: list[Try] = field(default_factory=list)
    changes: Changes = field(default_factory=dict)

    def add(self, record: dict[str, Any]) -> Try:
        """Judge an answer that was asked for with `changes`."""
        flags = flags_of(record["response"]["body"], {**self.asked, **self.changes})
        made = Try(record, flags, self.changes)
        self.tries.append(made)
        return made

    def next_changes(self, ladder: Ladder) -> Changes | None:
        """How to ask again; None if the last answer is to be kept, or there is no step left."""
        flags = self.tries[-1].flags
        if len(self.tries) > ladder.retries:
            return None
        if "repetition" in flags or "whitespace" in flags:
            return self._warmer(loop="repetition" in flags)
        if "truncated" in flags:
            wanted = ladder.more_tokens or "invalid_json" in flags
            return self._longer() if wanted else None
        if "invalid_json" in flags:
            return self._warmer(loop=False)
        return {} if flags == ("empty",) and len(self.tries) == 1 else None

    def best(self) -> dict[str, Any]:
        """The result line to keep: of the fewest defects; among equals the first, if not cut."""
        kept = min(self.tries, key=self._rank)
        pipeline = kept.record["pipeline"]
        pipeline["flags"] = [*kept.flags, *pipeline["flags"]]
        pipeline["attempts"] = self.tries[-1].record["pipeline"]["attempts"]
        if len(self.tries) > 1:
            pipeline["tries"] = [each.as_record() for each in self.tries]
        return kept.record

    def _rank(self, each: Try) -> tuple[int, int, int]:
        defects = sum(flag in DEFECTS for flag in each.flags)
        later = self.tries.index(each)
        return defects, len(each.flags), -later if "truncated" in each.flags else later

    def _longer(self) -> Changes | None:
        name = next((name for name in _TOKEN_LIMITS if isinstance(self.asked.get(name), int)), None)
        if name is None or any(name in each.changes for each in self.tries):
            return None  # it had the whole context, or twice as many did not do
        return {name: 2 * self.asked[name]}

    def _warmer(self, *, loop: bool) -> Changes | None:
        used = sum("temperature" in each.changes for each in self.tries)
        if used == len(TEMPERATURES):
            return None
        asked = self.asked.get("temperature")
        least = asked if isinstance(asked, int | float) else 0.0
        changes: Changes = {"temperature": max(least, TEMPERATURES[used])}
        if self.asked.get("seed") is None:
            changes["seed"] = used + 1  # the same again on the next machine
        if loop and "repetition_detection" not in self.asked:
            changes["repetition_detection"] = REPETITION_DETECTION
        return changes
