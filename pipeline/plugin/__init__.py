"""Runs inside vLLM: DeepStack without the tower, references into the cache, the tower probe.

vLLM calls `register` in every process it starts, for every model of every user of this
machine. So it imports nothing heavy, acts only when the module it patches is imported,
patches only releases it knows, and never raises.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from pipeline.plugin import hooks, sources

CONNECTOR = "pipeline-cache"  # for VLLM_MEDIA_CONNECTOR
WORKER_EXTENSION = "pipeline.plugin.probe.TowerProbe"  # for worker_extension_cls

ENV_CACHE = "PIPELINE_CONNECTOR_CACHE"  # the cache directory that references point into
ENV_TOWER = "PIPELINE_CONNECTOR_TOWER"  # the tower fingerprint that they belong to
ENV_WIDTH = "PIPELINE_CONNECTOR_WIDTH"  # values per row of the model's embeddings
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
    why not. `supported` means that every patch fits: refuse to start an engine otherwise.
    """
    version = sources.vllm_version()
    states = {name: hooks.applied.get(name) or _fit(name) for name in sources.PATCHED}
    fits = all(state in ("ready", "applied") for state in states.values())
    return {"vllm": version, "supported": sources.is_known(version) and fits, "modules": states}


def _fit(name: str) -> str:
    return sources.misfit(name) or "ready"


def _register() -> None:
    if os.environ.get(ENV_DIE_WITH_PARENT):
        from pipeline.engines import guard

        guard.die_with_leader()  # vLLM's engine core would outlive a front end that is killed
    version = sources.vllm_version()
    if not sources.is_known(version):
        logger.warning("vlm-page-pipeline: vLLM %s is unknown, nothing patched", version)
        return
    for name in sources.PATCHED:
        hooks.after_import(name, _patch_model)
    hooks.after_import(_CONNECTOR_MODULE, _register_connector)
    if os.environ.get(ENV_TOWER_REPORT):
        hooks.after_import(_WORKER_MODULE, _report_after_load)


def _patch_model(module: Any) -> None:
    reason = sources.misfit(module.__name__)
    if reason:
        raise LookupError(reason)
    from pipeline.plugin import deepstack

    deepstack.patch(module)


def _register_connector(module: Any) -> None:
    from pipeline.plugin.connector import CacheConnector

    module.MEDIA_CONNECTOR_REGISTRY.register(CONNECTOR)(CacheConnector)


def _report_after_load(module: Any) -> None:
    from pipeline.plugin import probe

    probe.report_after_load(module.Worker, os.environ[ENV_TOWER_REPORT])
