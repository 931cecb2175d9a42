"""The settings of a checkpoint's image processor, read without transformers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pipeline.checkpoint import Model, checked_settings, read_json
from pipeline.errors import CheckpointError, UsageError

# PIL's numbers for the ways to resample
RESAMPLES = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}


def given_settings(model: Model) -> dict[str, Any]:
    """The image processor's settings as the checkpoint has them, defaults left out.

    A null stands for the default, as it does in transformers, whose version 5 saves them inside
    processor_config.json, which goes first. Raises CheckpointError where there are none.
    """
    nested = model.path / "processor_config.json"
    found = read_json(nested).get("image_processor") if nested.is_file() else None
    given = found or read_json(model.path / "preprocessor_config.json")
    if not isinstance(given, dict):
        raise CheckpointError(f"image processor of `{model.name}` is no JSON object")
    return {name: value for name, value in given.items() if value is not None}


def processor_settings(
    model: Model, defaults: Mapping[str, Any], kinds: Collection[str]
) -> dict[str, Any]:
    """`defaults` (those of transformers' class) overridden by what the checkpoint has.

    Raises CheckpointError for a processor that is none of `kinds`, and for one that leaves out
    a step which the tower was trained with.
    """
    given = given_settings(model)
    settings = checked_settings(given, defaults, f"image processor of `{model.name}`")
    kind = given.get("image_processor_type", next(iter(kinds)))
    switched_off = [
        name for name in ("do_resize", "do_rescale", "do_normalize") if not settings.get(name, True)
    ]
    wrong_resample = settings.get("resample", 3) not in RESAMPLES
    if kind not in kinds or switched_off or wrong_resample:
        what = kind if kind not in kinds else ", ".join(switched_off) or "resample"
        raise CheckpointError(
            f"`{model.name}` has an image processor that is not supported: {what}",
            f"supported is {next(iter(kinds))} with resize, rescale and normalise on",
        )
    return settings


def refuse_pixel_budget(name: str, min_pixels: int | None, max_pixels: int | None) -> None:
    """Raise UsageError if a pixel budget was given for a family that has none."""
    if min_pixels is not None or max_pixels is not None:
        raise UsageError(
            f"models of type {name} have no pixel budget",
            "leave out `--min-pixels` and `--max-pixels`: the processor's tiles decide",
        )


def normalisation_warnings(model: Model) -> tuple[str, ...]:
    """Name what vLLM's native path would silently do without: it reads these keys literally."""
    missing = [name for name in ("image_mean", "image_std") if name not in given_settings(model)]
    if not missing:
        return ()
    return (
        f"the image processor's JSON has no {' and no '.join(missing)}: vLLM's native path may "
        "feed raw pixels to the tower then; embeddings made here use the class defaults",
    )
