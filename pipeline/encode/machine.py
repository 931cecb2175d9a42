"""What this machine's processor is good for: how many threads, which arithmetic."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_TOPOLOGY = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")
_M_MMAP_THRESHOLD = -3  # malloc.h
_MAPPED_APART_BYTES = 4 << 20
# /proc/cpuinfo's names for instructions that multiply bfloat16; elsewhere it is emulated
_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting with the reason for it, for people."""

    value: str
    reason: str


def choose_precision(asked: str, flags: Set[str] | None = None) -> Choice:
    """The arithmetic of the tower; `auto` takes an exact one.

    float32 is exact, and the only exact one today. bfloat16 would cost accuracy, and on a
    processor that lacks instructions for it, tens of times the time as well
    (https://github.com/pytorch/pytorch/issues/146508).
    """
    if asked != "auto":
        return Choice(asked, "asked for")
    found = cpu_flags() if flags is None else flags
    if found & _BFLOAT16:
        return Choice("float32", "exact; bfloat16 would not be")
    return Choice("float32", "exact; this processor has no bfloat16 instructions")


def cpu_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """The instruction sets of the first processor in /proc/cpuinfo; empty where there is none."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, words = line.partition(":")
        if name.strip() in ("flags", "Features"):  # x86, Arm
            return frozenset(words.split())
    return frozenset()


def physical_cores(topology: Path = _TOPOLOGY, cgroup: Path = _CGROUP) -> int:
    """Cores that this process may use: affinity and cgroup limit respected, hyper-threads not
    counted, at least one.

    Two threads on one core share its multipliers: more of them only hold each other up.
    """
    processors = os.sched_getaffinity(0)
    cores = {_core_of(number, topology) for number in processors}
    quota = _quota(cgroup)
    return max(1, len(cores) if quota is None else min(len(cores), int(quota)))


def prepare_process(threads: int) -> None:
    """Set this process up to run a tower: its threads, and an allocator that gives memory back.

    glibc raises the size from which blocks are mapped apart with the blocks it sees freed, and
    then keeps a page's activations in its heap, in pieces.
    """
    import torch

    torch.set_num_threads(threads)
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_APART_BYTES)


def _core_of(processor: int, topology: Path) -> tuple[str, str]:
    """(package, core) of a processor; itself where the kernel does not tell."""
    place = topology / f"cpu{processor}" / "topology"
    try:
        package = (place / "physical_package_id").read_text().strip()
        return package, (place / "core_id").read_text().strip()
    except OSError:
        return "", f"processor {processor}"


def _quota(cgroup: Path) -> float | None:
    """Processors' worth of time that the cgroup (version 2) grants; None if it is not limited."""
    try:
        granted, period = (cgroup / "cpu.max").read_text().split()
        return None if granted == "max" else int(granted) / int(period)
    except (OSError, ValueError):
        return None
