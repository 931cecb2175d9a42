"""What an engine is started with: less memory after it ran out of it, and care with hybrids."""

from __future__ import annotations

from dataclasses import replace

from pipeline.config import EngineOptions
from pipeline.errors import UsageError

VLLM_UTILIZATION = 0.92  # vLLM 0.32's own default
VLLM_BATCH_TOKENS = 2048  # the least of its own defaults
BATCH_STEP_TOKENS = 1024
UTILIZATION_STEP, LEAST_UTILIZATION = 0.05, 0.7
LARGEST_BATCH_STEP_TOKENS, LEAST_BATCH_TOKENS = 2048, 512

# Hybrids (GDN, mamba, short convolutions) need scratch memory that vLLM's profiler does not see:
# at 0.92 and 8,192 tokens a card dies of the first long prompt, with these it does not
# (vllm-project/vllm#52872).
HYBRID_UTILIZATION = 0.85
HYBRID_BATCH_TOKENS = 3072
_KV_BYTES = "--kv-cache-memory-bytes"


def with_less_memory(options: EngineOptions, *, cpu: bool) -> EngineOptions | None:
    """The next smaller settings after an engine ran out of memory; None if there are none.

    On a GPU its share of the memory goes down first, on CPU the KV cache; then the tokens per
    step.
    """
    share = options.gpu_memory_utilization or VLLM_UTILIZATION
    if cpu and options.kv_cache_gib > 1:
        return replace(options, kv_cache_gib=options.kv_cache_gib // 2)
    if not cpu and share - UTILIZATION_STEP >= LEAST_UTILIZATION:
        return replace(options, gpu_memory_utilization=round(share - UTILIZATION_STEP, 2))
    batch = options.max_num_batched_tokens
    smaller = LARGEST_BATCH_STEP_TOKENS if batch is None else batch // 2
    if smaller < max(LEAST_BATCH_TOKENS, options.least_batch_tokens):
        return None
    return replace(options, max_num_batched_tokens=smaller)


def for_hybrid(options: EngineOptions, *, cpu: bool) -> EngineOptions:
    """The settings for a hybrid model where none were given.

    Raises UsageError for a KV cache of a given size, since the state cache would lie on top.
    """
    for argument in options.extra_arguments:
        if argument.partition("=")[0] == _KV_BYTES:
            raise UsageError(
                f"this model is a hybrid: with `{_KV_BYTES}` its state cache lies on top of the "
                "KV cache, and the first long prompt runs out of memory",
                "give `--gpu-memory-utilization SHARE` instead",
            )
    share = options.gpu_memory_utilization
    return replace(
        options,
        gpu_memory_utilization=HYBRID_UTILIZATION if share is None and not cpu else share,
        max_num_batched_tokens=options.max_num_batched_tokens
        or max(HYBRID_BATCH_TOKENS, options.least_batch_tokens),
    )


def for_pages(options: EngineOptions, largest_tokens: int) -> EngineOptions:
    """The settings for pages of up to so many rows.

    vLLM's cache of rows that wait for their prompt is as large as a step, unless it loads the
    tower, and a page that does not fit is rejected.
    """
    batch = options.max_num_batched_tokens
    if batch is None and largest_tokens > VLLM_BATCH_TOKENS:
        batch = -(-largest_tokens // BATCH_STEP_TOKENS) * BATCH_STEP_TOKENS
    return replace(options, max_num_batched_tokens=batch, least_batch_tokens=largest_tokens)


def changed(before: EngineOptions, after: EngineOptions) -> str:
    """What differs, as options: `--gpu-memory-utilization 0.87`."""
    names = ("gpu_memory_utilization", "kv_cache_gib", "max_num_batched_tokens")
    return " ".join(
        f"--{name.replace('_', '-')} {getattr(after, name)}"
        for name in names
        if getattr(before, name) != getattr(after, name)
    )
