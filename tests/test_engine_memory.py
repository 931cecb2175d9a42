"""Engines that run out of memory, and hybrids, which do so where others do not."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config import EngineOptions
from pipeline.engines.contract import EngineDeath
from pipeline.engines.last_words import Note, NoteKeeper, root_cause
from pipeline.engines.memory import changed, for_hybrid, for_pages, with_less_memory
from pipeline.engines.supervisor import Death, SetAside, supervise
from pipeline.errors import EngineLostError, UsageError
from pipeline.families.hybrid import is_hybrid
from pipeline.jobs import Request, Result


def ladder(options: EngineOptions, *, cpu: bool) -> list[str]:
    steps = []
    while (smaller := with_less_memory(options, cpu=cpu)) is not None:
        steps.append(changed(options, smaller))
        options = smaller
    return steps


def test_a_gpu_gives_its_share_first_then_tokens_per_step() -> None:
    share, batch = "--gpu-memory-utilization", "--max-num-batched-tokens"
    assert ladder(EngineOptions(), cpu=False) == [
        *(f"{share} {value}" for value in (0.87, 0.82, 0.77, 0.72)),
        *(f"{batch} {value}" for value in (2048, 1024, 512)),
    ]
    given = EngineOptions(gpu_memory_utilization=0.75, max_num_batched_tokens=3072)
    assert ladder(given, cpu=False) == [f"{share} 0.7", f"{batch} 1536", f"{batch} 768"]


def test_on_cpu_the_kv_cache_is_halved() -> None:
    assert ladder(EngineOptions(kv_cache_gib=4, max_num_batched_tokens=1024), cpu=True) == [
        "--kv-cache-gib 2",
        "--kv-cache-gib 1",
        "--max-num-batched-tokens 512",
    ]


def test_a_hybrid_is_started_with_care() -> None:
    options = for_hybrid(EngineOptions(), cpu=False)
    assert (options.gpu_memory_utilization, options.max_num_batched_tokens) == (0.85, 3072)
    given = EngineOptions(gpu_memory_utilization=0.9, max_num_batched_tokens=8192)
    assert for_hybrid(given, cpu=False) == given
    assert for_hybrid(EngineOptions(), cpu=True).gpu_memory_utilization is None
    assert changed(options, with_less_memory(options, cpu=False) or options).endswith("0.8")


def test_a_step_holds_the_largest_page() -> None:
    assert for_pages(EngineOptions(), 2048).max_num_batched_tokens is None, "vLLM's default does"
    assert for_pages(EngineOptions(), 2049).max_num_batched_tokens == 3072
    given = for_pages(EngineOptions(max_num_batched_tokens=4096), 5000)
    assert given.max_num_batched_tokens == 4096, "said is said"
    large = for_pages(EngineOptions(), 6000)
    assert for_hybrid(large, cpu=True).max_num_batched_tokens == 6144
    assert with_less_memory(large, cpu=True) is None, "with less, the page would be rejected"
    small = for_pages(EngineOptions(), 1500)
    assert for_hybrid(small, cpu=True).max_num_batched_tokens == 3072
    assert ladder(small, cpu=True) == ["--max-num-batched-tokens 2048"]


@pytest.mark.parametrize(
    "words", [("--kv-cache-memory-bytes", "1000"), ("--kv-cache-memory-bytes=1",)]
)
def test_a_hybrid_is_given_no_kv_cache_of_a_fixed_size(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="state cache lies on top") as raised:
        for_hybrid(EngineOptions(extra_arguments=words), cpu=False)
    assert "--gpu-memory-utilization" in raised.value.hint


@pytest.mark.parametrize(
    ("config", "hybrid"),
    [
        ({"text_config": {"layer_types": ["linear_attention", "full_attention"]}}, True),
        ({"text_config": {"full_attention_interval": 4}}, True),
        ({"text_config": {"layer_types": ["conv", "full_attention"]}}, True),
        ({"mamba_d_state": 16}, True),
        ({"text_config": {"layer_types": ["full_attention", "sliding_attention"]}}, False),
        ({"text_config": None}, False),
        ({}, False),
    ],
)
def test_hybrids_are_told_by_their_config(config: dict[str, object], hybrid: bool) -> None:
    assert is_hybrid(config) is hybrid


# ---------------------------------------------------------------- last words


def write(path: Path, *notes: Note) -> None:
    keeper, logger = NoteKeeper(path), logging.getLogger("test of last words")
    logger.addHandler(keeper)
    for note in notes:
        try:
            raise type(note.type, (Exception,), {})(note.message)
        except Exception:
            logger.exception("something went wrong")
    logger.error("no exception")
    logger.removeHandler(keeper)


GPU = Note("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB")
CPU = Note(
    "RuntimeError", "[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory"
)
BUSY = Note("ValueError", "Free memory on device cuda:0 (1/80 GiB) on startup is less than desired")
SPLIT = Note("RuntimeError", "split_with_sizes expects split_sizes to sum exactly to 52")
WRAPPED = Note("RuntimeError", "Engine core initialization failed. See root cause above.")
DEAD = Note("EngineDeadError", "EngineCore encountered an issue.")


@pytest.mark.parametrize(
    ("notes", "cause", "of_memory"),
    [
        ([SPLIT, DEAD], SPLIT, False),
        ([WRAPPED, GPU], GPU, True),
        ([DEAD, SPLIT, CPU], CPU, True),
        ([BUSY, WRAPPED], BUSY, True),
        ([Note("MemoryError", "")], Note("MemoryError", ""), True),
    ],
)
def test_the_root_cause_is_what_was_raised_first_hand(
    tmp_path: Path, notes: list[Note], cause: Note, of_memory: bool
) -> None:
    write(tmp_path / "notes", *notes)
    found = root_cause(tmp_path / "notes")
    assert found == cause and found.out_of_memory is of_memory
    assert not found.hopeless, "another start may succeed"


def test_what_is_wrong_with_an_argument_is_wrong_again() -> None:
    assert Note("ValidationError", "1 validation error for ModelConfig").hopeless


def test_what_others_say_is_no_cause(tmp_path: Path) -> None:
    assert root_cause(tmp_path / "none") is None
    write(tmp_path / "notes", DEAD, WRAPPED)
    with (tmp_path / "notes").open("a") as file:
        file.write('{"type": "torn')
    assert root_cause(tmp_path / "notes") is None


def test_a_note_is_one_line_of_the_message(tmp_path: Path) -> None:
    write(tmp_path / "notes", Note("OSError", "first\nsecond"))
    assert json.loads((tmp_path / "notes").read_text()) == {"type": "OSError", "message": "first"}
    assert (
        str(Note("OSError", "first")) == "OSError: first" and str(Note("OSError", "")) == "OSError"
    )


# ---------------------------------------------------------------- supervision


class Short:
    """Dies for want of memory until its KV cache is small enough; poison always needs too much."""

    def __init__(
        self, options: EngineOptions, fits_gib: int, starts: list[int], poison: str = ""
    ) -> None:
        self.options, self.fits_gib, self.starts, self.poison = options, fits_gib, starts, poison

    def settings(self) -> EngineOptions:
        return self.options

    def with_less_memory(self) -> Short | None:
        options = with_less_memory(self.options, cpu=True)
        return None if options is None else Short(options, self.fits_gib, self.starts, self.poison)

    def run(self, requests: Iterator[Request | None]) -> Iterator[Result]:
        self.starts.append(self.options.kv_cache_gib)
        for request in requests:
            if request is None:
                continue
            ready = self.options.kv_cache_gib <= self.fits_gib
            if not ready or request.custom_id == self.poison:
                raise EngineDeath("short", (request,), ready=ready, log="log", out_of_memory=True)
            yield Result(request.custom_id, 200, "", {}, None)


def requests(names: str) -> Iterator[Request]:
    return (Request(name, "/v1/chat/completions", {}, f"i{name}", (), (), 1) for name in names)


def test_a_start_without_memory_is_tried_with_less() -> None:
    starts: list[int] = []
    engine = Short(EngineOptions(kv_cache_gib=32), 1, starts)
    events = list(supervise(engine, requests("ab"), sleep=lambda seconds: None))
    assert starts == [32, 16, 8, 4, 2, 1], "as often as it takes, not as often as starts may fail"
    assert [event.custom_id for event in events if isinstance(event, Result)] == ["a", "b"]
    changes = [event.change for event in events if isinstance(event, Death)]
    assert changes == [f"--kv-cache-gib {gib}" for gib in (16, 8, 4, 2, 1)]


def test_a_request_that_is_too_large_does_not_slow_the_whole_night() -> None:
    starts: list[int] = []
    engine = Short(replace(EngineOptions(), kv_cache_gib=32), 32, starts, poison="b")
    events = list(supervise(engine, requests("abc"), sleep=lambda seconds: None))
    assert [event.request.custom_id for event in events if isinstance(event, SetAside)] == ["b"]
    assert [event.custom_id for event in events if isinstance(event, Result)] == ["a", "c"]
    assert starts == [32, 16, 8], "a step down at each of its two deaths"


def test_a_start_that_can_never_succeed_is_tried_once() -> None:
    class Refused(Short):
        def run(self, requests: Iterator[Request | None]) -> Iterator[Result]:
            self.starts.append(1)
            yield from ()
            raise EngineDeath("no such", (), ready=False, log="log", hopeless=self.poison == "")

    for poison, count in (("", 1), ("b", 4)):
        starts: list[int] = []
        engine = Refused(EngineOptions(), 1, starts, poison)
        with pytest.raises(EngineLostError, match="can't be started: no such"):
            list(supervise(engine, requests("ab"), sleep=lambda seconds: None))
        assert len(starts) == count


def test_asked_to_stop_a_dead_engine_stays_dead() -> None:
    starts: list[int] = []
    engine = Short(EngineOptions(kv_cache_gib=2), 1, starts)
    events = list(supervise(engine, requests("ab"), stopping=lambda: True))
    assert len(events) == 1 and starts == [2]
