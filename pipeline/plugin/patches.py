"""All patches, by the module of vLLM that each changes."""

from __future__ import annotations

from typing import Any, Protocol

from pipeline.plugin import deepstack, glm4v, guard, minicpmv4_6, paddleocr_vl, row_lists, sources


class Patch(Protocol):
    """A module beside this one; it imports nothing of vLLM before it is called."""

    @property
    def MODULES(self) -> tuple[str, ...]:
        """The modules of vLLM that it changes."""

    def source_misfit(self, name: str, text: str) -> str:
        """Why the text of vLLM's module `name` can't be patched; empty where it can."""

    def patch(self, module: Any) -> None:
        """Patch the imported module; a second call changes nothing."""


_PATCHES: tuple[Patch, ...] = (guard, deepstack, glm4v, minicpmv4_6, paddleocr_vl, row_lists)
BY_MODULE = {name: patch for patch in _PATCHES for name in patch.MODULES}


def misfit(name: str) -> str:
    """Why module `name` can't be patched; empty where it can."""
    if name not in BY_MODULE:
        return "there is no patch for it"
    try:
        text = sources.read_source(name)
    except OSError as error:
        return f"no source: {error}"
    return BY_MODULE[name].source_misfit(name, text)


def apply(module: Any) -> None:
    """Patch a module that has just been imported; raises LookupError for one that doesn't fit."""
    reason = misfit(module.__name__)
    if reason:
        raise LookupError(reason)
    BY_MODULE[module.__name__].patch(module)
