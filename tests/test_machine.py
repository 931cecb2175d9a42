"""Threads and arithmetic by what the processor has, on machines that are told, not had."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.encode.machine import choose_precision, cpu_flags, physical_cores

AVX2 = "processor : 0\nmodel name : Some CPU\nflags : fpu sse2 avx avx2 fma f16c\n\nprocessor : 1\n"


def machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    cores: int,
    threads_per_core: int = 1,
    packages: int = 1,
    allowed: set[int] | None = None,
    cpu_max: str | None = None,
) -> dict[str, Path]:
    """A machine as the kernel describes one; processors are numbered as Linux numbers them."""
    number = 0
    for _ in range(threads_per_core):
        for package in range(packages):
            for core in range(cores):
                place = tmp_path / f"cpu{number}" / "topology"
                place.mkdir(parents=True)
                (place / "physical_package_id").write_text(f"{package}\n")
                (place / "core_id").write_text(f"{core}\n")
                number += 1
    if cpu_max is not None:
        (tmp_path / "cpu.max").write_text(cpu_max)
    processors = set(range(number)) if allowed is None else allowed
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: processors)
    return {"topology": tmp_path, "cgroup": tmp_path}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"cores": 8}, 8),
        ({"cores": 8, "threads_per_core": 2}, 8),
        ({"cores": 4, "packages": 2, "threads_per_core": 2}, 8),
        ({"cores": 8, "threads_per_core": 2, "allowed": {0, 8}}, 1),
        ({"cores": 8, "allowed": {2, 3, 5}}, 3),
        ({"cores": 8, "cpu_max": "400000 100000\n"}, 4),
        ({"cores": 8, "cpu_max": "50000 100000\n"}, 1),
        ({"cores": 8, "cpu_max": "max 100000\n"}, 8),
        ({"cores": 8, "cpu_max": "nonsense"}, 8),
    ],
)
def test_threads_are_never_more_than_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: dict, expected: int
) -> None:
    assert physical_cores(**machine(tmp_path, monkeypatch, **shape)) == expected


def test_a_machine_that_tells_nothing_counts_its_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert physical_cores(tmp_path / "none", tmp_path / "none") == 3


def test_without_bfloat16_instructions_float32_is_chosen_and_said(tmp_path: Path) -> None:
    """On AVX2 alone bfloat16 is 44 to 500 times slower."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(AVX2)
    choice = choose_precision("auto", cpu_flags(cpuinfo))
    assert choice.value == "float32"
    assert "no bfloat16 instructions" in choice.reason


def test_auto_stays_exact_where_bfloat16_would_be_quick() -> None:
    for flag in ("avx512_bf16", "amx_bf16", "bf16"):
        assert choose_precision("auto", {flag}).value == "float32"
        assert "no bfloat16" not in choose_precision("auto", {flag}).reason
    assert choose_precision("float32").value == "float32"


def test_a_processor_that_tells_nothing_has_no_flags(tmp_path: Path) -> None:
    assert cpu_flags(tmp_path / "none") == frozenset()
