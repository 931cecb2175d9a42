"""That the vision tower is absent is asserted from what the workers say, never assumed."""

from __future__ import annotations

from typing import Any

from pipeline.engines.arguments import ModelSource
from pipeline.errors import PipelineError


def check_tower(reports: list[dict[str, Any]], model: ModelSource) -> None:
    """Raise PipelineError unless every worker's tower is absent (or, native, loaded).

    `reports` holds one report per worker: class and parameter count of the tower, and whether
    the model will use DeepStack features, which must not be dropped silently.
    """
    if not reports:
        raise PipelineError(
            "no worker reported its vision tower",
            "is the `pipeline` package installed in the environment that runs vLLM?",
        )
    for report in reports:
        if report["class"] is None or (int(report["parameters"]) > 0) != model.native:
            found = f"{report['class']} with {report['parameters']} parameters"
            raise PipelineError(
                f"the vision tower should be {'loaded' if model.native else 'absent'}, "
                f"found {found}",
                "an `--engine-arg` may have changed the image limit",
            )
        if model.deepstack and report["deepstack"] is False:
            raise PipelineError(
                "vLLM would drop the DeepStack features of every page",
                "the vLLM plugin did not apply to this version; `pipeline doctor` tells why",
            )
