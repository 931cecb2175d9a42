"""transformers' model class as a shell: its vision parts with weights, all else without memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint import Model
from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    import torch


def build_shell(model: Model, make: Callable[[], Any]) -> Any:
    """The module that `make` constructs, its parameters on the meta device, its buffers real.

    Buffers that no checkpoint holds (rotary frequencies, position ids) are computed by the
    constructors, so they must not be on the meta device. Raises CheckpointError for settings
    that transformers refuses.
    """
    try:
        with _parameters_on_meta():
            module = make()
    except Exception as error:  # transformers raises a dozen types for settings it refuses
        raise CheckpointError(
            f"`{model.name}`: transformers can't build its vision tower: {error}"
        ) from error
    return module.eval().requires_grad_(False)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    import torch
    from transformers.initialization import no_init_weights

    register = torch.nn.Module.register_parameter

    def register_on_meta(
        self: torch.nn.Module, name: str, param: torch.nn.Parameter | None
    ) -> None:
        if param is not None and not param.is_meta:
            param = torch.nn.Parameter(param.to("meta"), requires_grad=False)
        register(self, name, param)

    torch.nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        with no_init_weights():
            yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def fill_shell(
    model: Model,
    shell: Any,
    weights: Mapping[str, torch.Tensor],
    parts: tuple[str, ...],
    shell_prefix: str,
) -> None:
    """Assign every weight to the shell's tensor `shell_prefix` + name.

    Raises CheckpointError naming what `parts` of the shell miss, what is left over, and what has
    another shape.
    """
    expected = {
        name.removeprefix(shell_prefix): tuple(tensor.shape)
        for name, tensor in shell.state_dict().items()
        if name.startswith(tuple(shell_prefix + part for part in parts))
    }
    given = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    require_tensors(model, given, expected)
    named = {shell_prefix + name: tensor for name, tensor in weights.items()}
    shell.load_state_dict(named, strict=False, assign=True)


def require_tensors(
    model: Model, given: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise CheckpointError unless exactly the expected tensors are there."""
    problems = {
        "missing": sorted(expected.keys() - given.keys()),
        "left over": sorted(given.keys() - expected.keys()),
        "of another shape": [
            f"{name} {list(given[name])} instead of {list(expected[name])}"
            for name in sorted(given.keys() & expected.keys())
            if given[name] != expected[name]
        ],
    }
    found = [f"{what}: {_some(names)}" for what, names in problems.items() if names]
    if found:
        raise CheckpointError(
            f"vision tower of `{model.name}`: tensors " + "; ".join(found),
            "weights and config.json do not belong together",
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
