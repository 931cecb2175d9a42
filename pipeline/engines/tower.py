"""That the vision tower is absent is asserted from what the workers say, never assumed."""

from __future__ import annotations

from typing import Any

from pipeline.errors import PipelineError


def check_tower(reports: list[dict[str, Any]], *, native: bool) -> None:
    """Raise PipelineError unless every worker's tower is absent (or, native, loaded).

    `reports` holds one report per worker: class and parameter count of the tower.
    """
    if not reports:
        raise PipelineError(
            "no worker reported its vision tower",
            "is the `pipeline` package installed in the environment that runs vLLM?",
        )
    for report in reports:
        loaded = int(report["parameters"]) > 0
        if loaded != native:
            found = f"{report['class']} with {report['parameters']} parameters"
            raise PipelineError(
                f"the vision tower should be {'loaded' if native else 'absent'}, found {found}",
                "an `--engine-arg` may have changed the image limit",
            )
