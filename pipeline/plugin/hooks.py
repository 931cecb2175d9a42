"""Call a function once a module has been imported, without importing it ourselves.

Importing the models would cost every vLLM process seconds and memory; most never use them.
"""

from __future__ import annotations

import importlib.abc
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Callback = Callable[[Any], None]

logger = logging.getLogger(__name__)

applied: dict[str, str] = {}  # module name → "applied" or the reason why not


def after_import(name: str, callback: Callback) -> None:
    """Run `callback(module)` after the first import of `name`, now if that has happened.

    Once per process; an exception in `callback` is logged, and stays out of the import.
    """
    if name in applied:
        return
    if name in sys.modules:
        _apply(sys.modules[name], callback)
        return
    _finder().callbacks[name] = callback


def _apply(module: ModuleType, callback: Callback) -> None:
    name = module.__name__
    if name in applied:
        return
    try:
        callback(module)
        applied[name] = "applied"
    except Exception as error:  # vLLM must come up whatever happens here
        applied[name] = f"not patched: {error}"
        logger.warning("vlm-page-pipeline: %s not patched: %s", name, error)


def _finder() -> _Finder:
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            return finder
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    return finder


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it wraps the loader that the other finders come up with."""

    def __init__(self) -> None:
        self.callbacks: dict[str, Callback] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        callback = self.callbacks.get(fullname)
        if callback is None:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, callback)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Loads as the real loader does, puts that one back, then calls back."""

    def __init__(self, inner: Any, callback: Callback) -> None:
        self._inner = inner
        self._callback = callback

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        _apply(module, self._callback)
