"""Options of the commands that start vLLM, and the check that it can be started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from pipeline.cli import options
from pipeline.config import DRIVERS, EngineOptions, vllm_version
from pipeline.errors import MissingExtraError, PipelineError, UsageError

Command = Callable[..., Any]

_OPTIONS = (
    click.option(
        "--dtype",
        type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
        default="auto",
        show_default=True,
        help="Arithmetic of the language model.",
    ),
    click.option(
        "--max-model-len",
        type=click.IntRange(min=1),
        metavar="N",
        help="Context in tokens.  [default: the model's own]",
    ),
    click.option(
        "--max-num-seqs",
        type=click.IntRange(min=1),
        default=16,
        show_default=True,
        metavar="N",
        help="Requests that the engine runs at once.",
    ),
    click.option(
        "--max-num-batched-tokens",
        type=click.IntRange(min=1),
        metavar="N",
        help="Tokens per step of the engine.  [default: vLLM's]",
    ),
    click.option(
        "--tensor-parallel-size", "--tp", type=click.IntRange(min=1), default=1, metavar="N",
        help="GPUs that share each layer.  [default: 1]",
    ),
    click.option(
        "--pipeline-parallel-size", "--pp", type=click.IntRange(min=1), default=1, metavar="N",
        help="Groups of GPUs that share the layers.  [default: 1]",
    ),
    click.option(
        "--gpu-memory-utilization",
        type=click.FloatRange(0, 1, min_open=True),
        metavar="SHARE",
        help="Share of GPU memory that the engine may use.  [default: vLLM's]",
    ),
    click.option(
        "--kv-cache-gib",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        metavar="GIB",
        help="Memory for the KV cache where vLLM runs on CPU.",
    ),
    click.option(
        "--max-in-flight-bytes",
        type=click.IntRange(min=1),
        metavar="N",
        help="Embeddings handed to the engine at once.  [default: a quarter of free memory]",
    ),
    click.option(
        "--start-timeout",
        "start_timeout_s",
        type=click.FloatRange(0, min_open=True),
        default=900,
        show_default=True,
        metavar="SECONDS",
        help="An engine that is not up by then is taken for dead.",
    ),
    click.option(
        "--stall-timeout",
        "stall_timeout_s",
        type=click.FloatRange(0, min_open=True),
        default=600,
        show_default=True,
        metavar="SECONDS",
        help="An engine that makes no step for so long is taken for dead.",
    ),
    click.option(
        "--engine-arg",
        "engine_arguments",
        multiple=True,
        metavar="NAME=VALUE",
        help="Any other argument of vLLM's server; may be repeated.",
    ),
)  # fmt: skip


def engine_options(command: Command) -> Command:
    """The flags of vLLM that have safe defaults of ours, and --engine-arg for the rest."""
    for decorate in reversed(_OPTIONS):
        command = decorate(command)
    return command


def driver_option(command: Command) -> Command:
    """--engine."""
    return click.option(
        "--engine",
        "driver",
        type=click.Choice(DRIVERS),
        default=DRIVERS[0],
        show_default=True,
        help="Feed vLLM continuously, or give its own batch runner one shard after another.",
    )(command)


def replicas_option(command: Command) -> Command:
    """--replicas."""
    return click.option(
        "--replicas",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        metavar="N",
        help="Engines fed from one queue, each with GPUs (or cores) of its own.",
    )(command)


def engine_options_of(values: dict[str, Any]) -> EngineOptions:
    """Take the engine's options out of a command's arguments."""
    extra = tuple(vllm_argument(text) for text in values.pop("engine_arguments"))
    names = set(EngineOptions.__dataclass_fields__) & values.keys()
    return EngineOptions(
        extra_arguments=tuple(word for words in extra for word in words),
        **{name: values.pop(name) for name in names},
    )


def vllm_argument(text: str) -> tuple[str, ...]:
    """`name=value` as vLLM's `--name value`; a bare `name` is a switch.

    Raises UsageError for an empty name.
    """
    name, equals, value = text.partition("=")
    name = name.strip().lstrip("-").replace("_", "-")
    if not name:
        raise UsageError(f"`--engine-arg {text}` has no name", "--engine-arg seed=1")
    return (f"--{name}", value) if equals else (f"--{name}",)


def require_engine(model: str | None, revision: str | None, *, quiet: bool = False) -> None:
    """Raise before anything is started unless vLLM is there and our plugin fits it.

    Says what is odd about the model. Raises CheckpointError too, for a model that is not known.
    """
    version = vllm_version()
    if version is None:
        raise MissingExtraError(
            "vLLM is not installed",
            "pip install 'vlm-page-pipeline[gpu]', or [cpu] with requirements/overrides.txt",
        )
    from pipeline.checkpoint import resolve_model
    from pipeline.families import family_of
    from pipeline.plugin import unfit

    found = resolve_model(model, revision)
    options.say_warnings(found, quiet)
    family = family_of(found)
    if reasons := unfit(family.patches):
        why = "; ".join(f"{module}: {reason}" for module, reason in reasons.items())
        raise PipelineError(
            f"vLLM {version} can't take embeddings of {family.name} models without the vision "
            f"tower: {why}",
            "use vLLM 0.32, or a newer version of this package",
        )
