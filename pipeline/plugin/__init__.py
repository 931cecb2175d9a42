"""Runs inside vLLM: embeddings without the tower, references into the cache, the tower probe.

vLLM calls `register` in every process it starts, for every model of every user of this
machine. So it imports nothing heavy, acts only when the module it patches is imported,
patches only releases it knows, and never raises.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

from pipeline.config import vllm_version
from pipeline.plugin import hooks, patches, sources
from pipeline.plugin.guard import ENV_WIDTH

__all__ = ["CONNECTOR", "ENV_WIDTH", "WORKER_EXTENSION", "patch_status", "register", "unfit"]

CONNECTOR = "pipeline-cache"  # for VLLM_MEDIA_CONNECTOR
WORKER_EXTENSION = "pipeline.plugin.probe.TowerProbe"  # for worker_extension_cls

ENV_CACHE = "PIPELINE_CONNECTOR_CACHE"  # the cache that references point into: directory or URL
ENV_LOCAL = "PIPELINE_CONNECTOR_CACHE_LOCAL"  # its read-through tier, and how much that may take
ENV_LOCAL_BYTES = "PIPELINE_CONNECTOR_CACHE_LOCAL_BYTES"
ENV_TOWER = "PIPELINE_CONNECTOR_TOWER"  # the tower fingerprint that they belong to
ENV_DIE_WITH_PARENT = "PIPELINE_DIE_WITH_PARENT"  # set by our drivers for their own engines
ENV_TOWER_REPORT = "PIPELINE_TOWER_REPORT"  # a directory: each worker writes its report there

_CONNECTOR_MODULE = "vllm.multimodal.media.connector"
_WORKER_MODULE = "vllm.v1.worker.gpu_worker"

logger = logging.getLogger(__name__)


def register() -> None:
    """The entry point `vllm.general_plugins`; may be called any number of times."""
    try:
        _register()
    except Exception as error:  # an exception here would break every vLLM on the machine
        logger.warning("vlm-page-pipeline: plugin not active: %r", error)


def patch_status() -> dict[str, Any]:
    """What the plugin does to the installed vLLM, found without importing it.

    `{"vllm": version or None, "supported": bool, "modules": {name: state}}`; a state is
    "ready" (will be patched on import), "applied" (is patched in this process) or the reason
    why not. `supported` means that every patch fits; `unfit` tells of some of them.
    """
    version = vllm_version()
    states = {name: _state(name) for name in patches.BY_MODULE}
    fits = all(state in ("ready", "applied") for state in states.values())
    return {"vllm": version, "supported": sources.is_known(version) and fits, "modules": states}


def unfit(modules: Iterable[str]) -> dict[str, str]:
    """Why modules of vLLM can't be patched, for those that can't; found without importing it.

    Refuse to start an engine for a model that needs one of them.
    """
    version = vllm_version()
    if not sources.is_known(version):
        return {name: f"vLLM {version} is unknown" for name in modules}
    return {name: reason for name in modules if (reason := patches.misfit(name))}


def _state(name: str) -> str:
    return hooks.applied.get(name) or patches.misfit(name) or "ready"


def _register() -> None:
    if os.environ.get(ENV_DIE_WITH_PARENT):
        from pipeline.engines import guard, last_words

        guard.die_with_leader()  # vLLM's engine core would outlive a front end that is killed
        last_words.keep_notes()
    version = vllm_version()
    if not sources.is_known(version):
        logger.warning("vlm-page-pipeline: vLLM %s is unknown, nothing patched", version)
        return
    for name in patches.BY_MODULE:
        hooks.after_import(name, patches.apply)
    hooks.after_import(_CONNECTOR_MODULE, _register_connector)
    if os.environ.get(ENV_TOWER_REPORT):
        hooks.after_import(_WORKER_MODULE, _report_after_load)


def _register_connector(module: Any) -> None:
    from pipeline.plugin.connector import CacheConnector

    module.MEDIA_CONNECTOR_REGISTRY.register(CONNECTOR)(CacheConnector)


def _report_after_load(module: Any) -> None:
    from pipeline.plugin import probe

    probe.report_after_load(module.Worker, os.environ[ENV_TOWER_REPORT])
