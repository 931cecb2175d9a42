"""Asks the worker itself which vision tower it has loaded."""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_PAGE = 1024  # ru_maxrss counts KiB on Linux


class TowerProbe:
    """Worker extension: `collective_rpc("pipeline_tower_report")`, one report per worker."""

    def pipeline_tower_report(self) -> dict[str, Any]:
        """See `tower_report`; the worker class that vLLM mixes us into has `get_model`."""
        return tower_report(self.get_model())  # type: ignore[attr-defined]


def tower_report(model: Any) -> dict[str, Any]:
    """What is loaded of the model's vision tower, as JSON data.

    `{"class", "parameters", "bytes", "model", "deepstack", "towers", "peak_rss_bytes",
    "peak_device_bytes"}`; `class` is the tower's, `StageMissingLayer` where it is absent;
    `parameters` and `bytes` count what lies in memory; `towers` has one
    `{"class", "parameters", "bytes"}` per tower or connector module; `deepstack` is None for
    a model that knows no such thing.
    """
    towers = {name: _weigh(module) for name, module in _towers(model).items()}
    present = [tower for tower in towers.values() if tower["parameters"]]
    first = (present or list(towers.values()) or [{"class": None}])[0]
    return {
        "class": first["class"],
        "parameters": sum(tower["parameters"] for tower in towers.values()),
        "bytes": sum(tower["bytes"] for tower in towers.values()),
        "model": type(model).__name__,
        "deepstack": getattr(model, "use_deepstack", None),
        "towers": towers,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PAGE,
        "peak_device_bytes": _peak_device_bytes(),
    }


def report_after_load(worker_class: Any, directory: str) -> None:
    """Make each worker write its report below `directory` once its model is loaded.

    For vLLM's own batch runner, which offers no call into the worker.
    """
    load_model = worker_class.load_model

    def load_and_report(self: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = load_model(self, *args, **kwargs)
        try:
            _write(Path(directory), self.rank, tower_report(self.get_model()))
        except Exception as error:  # a missing report stops the driver, not this engine
            logger.warning("vlm-page-pipeline: no tower report: %r", error)
        return loaded

    worker_class.load_model = load_and_report


def read_reports(directory: Path) -> list[dict[str, Any]]:
    """The reports that the workers of one engine have written, by rank."""
    paths = sorted(directory.glob("tower-*.json"))
    return [json.loads(path.read_text()) for path in paths]


def _write(directory: Path, rank: int, report: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"tower-{rank:05d}.json"
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    beside.write_text(json.dumps(report) + "\n")
    os.replace(beside, path)


def _towers(model: Any) -> dict[str, Any]:
    """The modules that see images, by name; no module inside another of them.

    vLLM's own marks, its module mapping, and whatever it left out.
    """
    names = set(getattr(model, "_tower_model_names", ()))
    if hasattr(model, "get_mm_mapping"):
        mapping = model.get_mm_mapping()
        names |= {name.rstrip(".") for name in [*mapping.tower_model, *mapping.connector]}
    modules = dict(model.named_modules())
    names |= {name for name, part in modules.items() if type(part).__name__ == "StageMissingLayer"}
    names &= modules.keys()
    inner = {name for name in names if any(name.startswith(f"{other}.") for other in names)}
    return {name: modules[name] for name in sorted(names - inner)}


def _weigh(module: Any) -> dict[str, Any]:
    loaded = [tensor for tensor in module.parameters() if not tensor.is_meta]
    return {
        "class": type(module).__name__,
        "parameters": sum(tensor.numel() for tensor in loaded),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in loaded),
    }


def _peak_device_bytes() -> int | None:
    torch = sys.modules["torch"]
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
