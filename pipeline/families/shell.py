"""transformers' model class as a shell: its vision parts with weights, all else without memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint import Model, require_tensors
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
