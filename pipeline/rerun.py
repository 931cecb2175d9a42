"""A rerun over pages that are all in the cache: no file is opened, nothing heavy is imported.

What an earlier run found is taken from the memo, as long as the files of the model, of this program
and of the pages are as they were; the entries themselves are looked for, each time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.memo import Memo, is_settled, program_state, state_of
from pipeline.tree import files_below

# libraries that have a say in what a page's pixels and size are
_LIBRARIES = ("transformers", "torchvision", "PIL", "pypdfium2")


@dataclass(frozen=True, slots=True)
class KnownTarget:
    """What a model with these options encodes for: `subject` names the facts about pages.

    `warnings` are those about the checkpoint.
    """

    subject: str
    tower_fingerprint: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AllCached:
    """Every page below some paths is in the cache; `skipped` counts files without pages."""

    pages: int
    skipped: int


def target_subject(spec_digest: str) -> str:
    """The name of facts about pages; of another version of this program they are others."""
    return f"pages {spec_digest} {program_state(*_LIBRARIES)}"


def model_state(model: Path) -> str | None:
    """What changes with any file of a model directory; None if it just changed."""
    digest = hashlib.sha256()
    try:
        with os.scandir(model) as found:
            files = sorted((each.name, each.stat()) for each in found if each.is_file())
    except OSError:
        return None
    for name, state in files:
        if not is_settled(state):
            return None
        digest.update(f"{name!a} {state_of(state)}\n".encode())
    return digest.hexdigest()


def recall_target(memo: Memo, model: Path, options: Mapping[str, Any]) -> KnownTarget | None:
    """The target of a model directory with these options, if it is known."""
    state = model_state(model)
    fact = None if state is None else memo.recall(_request(options), os.path.abspath(model), state)
    return None if fact is None else KnownTarget(fact[0], fact[1], tuple(fact[2]))


def note_target(memo: Memo, model: Path, options: Mapping[str, Any], target: KnownTarget) -> None:
    """Remember what `recall_target` gives."""
    if (state := model_state(model)) is not None:
        fact = [target.subject, target.tower_fingerprint, list(target.warnings)]
        memo.note(_request(options), os.path.abspath(model), state, fact)


def _request(options: Mapping[str, Any]) -> str:
    words = " ".join(f"{name}={options[name]}" for name in sorted(options))
    return f"target {words} {program_state(*_LIBRARIES)}"


def all_cached(
    paths: Sequence[Path], memo: Memo, subject: str, has: Callable[[str], bool]
) -> AllCached | None:
    """Count the pages below `paths`; None as soon as one is not known, or not in the cache.

    `has` says whether there is an entry under a key.
    """
    pages = skipped = 0
    files = list(_files(paths))
    facts = memo.recall_all(subject, [(path, state) for path, state, _ in files])
    for (_, _, named), keys in zip(files, facts, strict=True):
        if keys is None or (named and not keys):
            return None
        skipped += not keys
        pages += len(keys)
        if not all(map(has, keys)):
            return None
    return AllCached(pages, skipped)


def _files(paths: Iterable[Path]) -> Iterator[tuple[str, str, bool]]:
    """(absolute path, state, whether it was named itself) of each file, once."""
    seen = set[str]()
    for path in paths:
        named, top = not os.path.isdir(path), os.path.abspath(path)
        for name in [top] if named else files_below(top):
            if name not in seen:
                seen.add(name)
                yield name, _state(name), named


def _state(path: str) -> str:
    try:
        return state_of(os.stat(path))
    except OSError:
        return ""  # of no file
