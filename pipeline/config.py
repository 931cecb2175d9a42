"""Typed options and their defaults; what a command-line option or a later config file sets."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import UsageError

DEFAULT_CACHE = Path("cache")
DRIVERS = ("llm", "run-batch")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How vLLM is started. `None` leaves the choice to vLLM.

    `kv_cache_gib` is used by vLLM's CPU build only (VLLM_CPU_KVCACHE_SPACE); on a GPU
    `gpu_memory_utilization` decides. `max_in_flight_bytes` bounds the embeddings that the
    engine has been handed and has not finished; default a quarter of the available memory. An
    engine that is not up after `start_timeout_s`, or makes no step for `stall_timeout_s`, is
    taken for dead. A step must hold `least_batch_tokens`: vLLM, its tower off, takes no page with
    more rows than a step has tokens.
    """

    driver: str = "llm"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    kv_cache_gib: int = 1
    max_in_flight_bytes: int | None = None
    start_timeout_s: float = 900.0
    stall_timeout_s: float = 600.0
    replicas: int = 1
    least_batch_tokens: int = 0
    extra_arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.driver not in DRIVERS:
            raise UsageError(
                f"unknown engine `{self.driver}`", f"choose one of {', '.join(DRIVERS)}"
            )
        if self.replicas > 1 and self.driver != "llm":
            raise UsageError(
                f"`--replicas {self.replicas}` feeds engines from one queue, and vLLM's batch "
                "runner takes whole files",
                "leave out `--engine run-batch`",
            )

    @property
    def gpus(self) -> int:
        """GPUs that one engine takes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def in_flight_limit_bytes(self) -> int:
        """`max_in_flight_bytes`, or its default now."""
        if self.max_in_flight_bytes is not None:
            return self.max_in_flight_bytes
        return available_memory_bytes() // 4 // self.replicas


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """MemAvailable of /proc/meminfo (proc(5)); 8 GiB where there is none."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return 8 << 30
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def cpu_build_installed() -> bool:
    """True if the installed vLLM is its CPU build (distribution `vllm-cpu`)."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def vllm_directory() -> Path | None:
    """Where the package `vllm` lies; None where it is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def vllm_version() -> str | None:
    """The version written into the installed vLLM, without importing it; None if there is none.

    Not the distribution's: builds for CPU carry another distribution name.
    """
    directory = vllm_directory()
    path = directory and directory / "_version.py"
    if path is None or not path.is_file():
        return None
    found = re.search(r"^__version__\s*=.*?['\"]([^'\"]+)['\"]", path.read_text(), re.MULTILINE)
    return found[1] if found else None
