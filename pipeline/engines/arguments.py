"""What vLLM is started with: its own command-line arguments and its environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config import EngineOptions, cpu_build_installed
from pipeline.errors import UsageError
from pipeline.store.location import Location, Remote, address_of

WORKER_EXTENSION = "pipeline.plugin.probe.TowerProbe"
MEDIA_CONNECTOR = "pipeline-cache"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What an engine needs to know of the model and of the cache that belongs to it.

    `modalities` are the ones that the family has; each is limited to none, or its tower would
    be loaded or profiled after all. `native` loads the tower and takes images instead.
    `row_width` is that of the family's embeddings; `deepstack` tells whether they carry
    DeepStack features, `prompt_embeds` whether they are handed over inside the prompt.
    `config_overrides` go over config.json; `cpu_dtype` is the only dtype with which vLLM's CPU
    build runs the model. A `hybrid` keeps a state besides its KV cache.
    `largest_page_tokens` are the rows of the largest page it will be handed.
    """

    path: Path
    served_names: tuple[str, ...]
    cache: Location
    tower_fingerprint: str
    modalities: tuple[str, ...] = ("image", "video")
    row_width: int = 0
    deepstack: bool = False
    prompt_embeds: bool = False
    config_overrides: Mapping[str, Any] = field(default_factory=dict)
    cpu_dtype: str | None = None
    native: bool = False
    images_per_prompt: int = 8
    hybrid: bool = False
    largest_page_tokens: int = 0
    trust_remote_code: bool = False


def engine_arguments(model: ModelSource, options: EngineOptions) -> list[str]:
    """Arguments of vLLM's own parser (the same for both drivers).

    Raises UsageError for a dtype with which the model can't run here.
    """
    limits = {modality: 0 for modality in model.modalities}
    if model.native:
        limits["image"] = model.images_per_prompt
    arguments = [
        *("--model", str(model.path)),
        *("--served-model-name", *model.served_names),
        *("--dtype", _dtype(model, options)),
        *("--limit-mm-per-prompt", json.dumps(limits)),
        # each page is used once: vLLM's cache of processed images would only cost memory
        *("--mm-processor-cache-gb", "0"),
        *("--worker-extension-cls", WORKER_EXTENSION),
        *("--max-num-seqs", str(options.max_num_seqs)),
        *("--tensor-parallel-size", str(options.tensor_parallel_size)),
        *("--pipeline-parallel-size", str(options.pipeline_parallel_size)),
    ]
    if model.config_overrides:
        arguments += ["--hf-overrides", json.dumps(model.config_overrides)]
    if not model.native:
        arguments += _embedding_switches(model)
    if options.max_model_len is not None:
        arguments += ["--max-model-len", str(options.max_model_len)]
    if options.max_num_batched_tokens is not None:
        arguments += ["--max-num-batched-tokens", str(options.max_num_batched_tokens)]
    if options.gpu_memory_utilization is not None:
        arguments += ["--gpu-memory-utilization", str(options.gpu_memory_utilization)]
    if cpu_build_installed():
        arguments += ["--enforce-eager"]
    return [*arguments, *options.extra_arguments]


def _dtype(model: ModelSource, options: EngineOptions) -> str:
    only = model.cpu_dtype if cpu_build_installed() else None
    if only is None or options.dtype == only:
        return options.dtype
    if options.dtype == "auto":
        return only
    raise UsageError(
        f"on CPU, vLLM runs this model in {only} only, not in {options.dtype}",
        f"leave out `--dtype`, or give `--dtype {only}`",
    )


def _embedding_switches(model: ModelSource) -> list[str]:
    if not model.prompt_embeds:
        return ["--enable-mm-embeds"]
    # the child renders the chat template itself and hands over the result with a trivial one
    return ["--enable-prompt-embeds", "--trust-request-chat-template"]


def _place_of(cache: Location) -> dict[str, str]:
    """For the plugin's connector; empty is as good as not set."""
    tier = cache.tier if isinstance(cache, Remote) else None
    return {
        "PIPELINE_CONNECTOR_CACHE": address_of(cache),
        "PIPELINE_CONNECTOR_CACHE_LOCAL": "" if tier is None else str(tier.directory.resolve()),
        "PIPELINE_CONNECTOR_CACHE_LOCAL_BYTES": "" if tier is None else str(tier.max_bytes),
    }


def engine_environment(model: ModelSource, options: EngineOptions) -> dict[str, str]:
    """The child's whole environment: ours, plus what keeps vLLM quiet, offline and pointed."""
    environment = dict(os.environ)
    environment |= {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_MEDIA_CONNECTOR": MEDIA_CONNECTOR,
        **_place_of(model.cache),
        "PIPELINE_CONNECTOR_TOWER": model.tower_fingerprint,
        "PIPELINE_CONNECTOR_WIDTH": str(model.row_width or ""),
        "PIPELINE_DIE_WITH_PARENT": "1",
        "PYTHONUNBUFFERED": "1",
        # entries are read in many threads; an arena for each would keep what it once held
        "MALLOC_ARENA_MAX": environment.get("MALLOC_ARENA_MAX", "2"),
        "ARROW_DEFAULT_MEMORY_POOL": "system",
    }
    if model.native:
        del environment["VLLM_MEDIA_CONNECTOR"]
    if cpu_build_installed():
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", str(options.kv_cache_gib))
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return environment
