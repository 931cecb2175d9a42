"""`pipeline model`: everything that is known of a model before it is used."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click

from pipeline.cli import options

_A4_PX = {100: (1169, 827), 150: (1754, 1240), 200: (2339, 1654)}  # dpi → height, width
_ROW_VALUE_BYTES = 2  # entries are bfloat16


@click.command()
@click.argument("model", required=False, metavar="[MODEL]")
@click.option("--revision", metavar="COMMIT", help="Commit, tag or branch of a hub model.")
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
def model(model: str | None, revision: str | None, as_json: bool) -> None:
    """Show what is known of a model: family, tower, sizes, tokens per page, vLLM's flags.

    MODEL is a directory or a hub id; without it, the bundled tiny-reader is shown. The vision
    tensors are read to fingerprint them, no other weights, and nothing is encoded.

    \b
    Example:
      pipeline model /models/Qwen3-VL-8B-Instruct --json
      pipeline model Qwen/Qwen3-VL-8B-Instruct --revision 0c351dd
    """
    facts = facts_of(model, revision)
    if as_json:
        click.echo(json.dumps(facts))
        return
    for name, text in _rows(facts):
        click.echo(options.printable(f"{name:<14}{text}"))


def facts_of(name: str | None, revision: str | None) -> dict[str, Any]:
    """The facts as JSON data; raises CheckpointError for a model that can't be used."""
    from pipeline.checkpoint import quantisation_name
    from pipeline.config import DEFAULT_CACHE, EngineOptions
    from pipeline.engines.arguments import engine_arguments
    from pipeline.plugin import unfit
    from pipeline.run.images import PageOptions, open_pages

    pages = open_pages(PageOptions(DEFAULT_CACHE, name, revision))
    found, family, spec = pages.target.model, pages.target.family, pages.target.spec
    text_width, row_width = family.text_hidden_size(found.config), family.row_width(found.config)
    processor, _, backend = spec.processor.partition("/")
    source = pages.engine_source(pages.model_names)
    facts: dict[str, Any] = {
        "model": found.name,
        "path": str(found.path),
        "revision": found.revision,
        "model_type": found.config.get("model_type"),
        "family": family.name,
        "quantisation": quantisation_name(found.config),
        "tower": _tower(pages.target),
        "identity": pages.model_identity,
        "processor": {"class": processor, "backend": backend, "contract": spec.contract},
        "geometry": asdict(spec.geometry),  # type: ignore[call-overload]
        "row_width": row_width,
        "text_hidden_size": text_width,
        "deepstack_layers": row_width // text_width - 1 if row_width > text_width else 0,
        "a4": {
            str(dpi): _a4(spec.geometry.place(*size), row_width) for dpi, size in _A4_PX.items()
        },
        "delivery": family.delivery.value,
        "drivers": ["llm"] if source.prompt_embeds else ["llm", "run-batch"],
        "patches": list(family.patches),
        "engine_arguments": engine_arguments(source, EngineOptions()),
        "warnings": list(family.warnings(found)),
    }
    return facts | {"limits": _limits(facts, family.cpu_dtype, unfit(family.patches))}


def _tower(target: Any) -> dict[str, Any]:
    """Class, size and whereabouts of the vision tensors, with their fingerprint."""
    from pipeline.checkpoint import vision_places, weight_files

    family = target.family
    places = vision_places(target.model, family).values()
    parts = [*places, *(place.scale.place for place in places if place.scale is not None)]
    dtypes: dict[str, int] = {}
    for place in places:
        dtypes[place.dtype] = dtypes.get(place.dtype, 0) + place.values
    return {
        "class": getattr(family, "shell", None),
        "parameters": sum(dtypes.values()),
        "bytes": sum(place.stop - place.start for place in parts),
        "parameters_by_type": dtypes,
        "tensors": len(places),
        "shards": sorted({place.shard for place in parts}),
        "files": len(weight_files(target.model)),
        "fingerprint": target.store.tower_fingerprint,
    }


def _a4(placement: Any, row_width: int) -> dict[str, Any]:
    """An A4 page at the model."""
    return {
        "height_px": placement.height_px,
        "width_px": placement.width_px,
        "tiles": placement.tiles,
        "grid": None if placement.grid is None else list(placement.grid),
        "tokens": placement.tokens,
        "bytes": placement.tokens * row_width * _ROW_VALUE_BYTES,
    }


def _limits(facts: Mapping[str, Any], cpu_dtype: str | None, unfit: Mapping[str, str]) -> list[str]:
    """What can't be done with the model, one sentence each."""
    limits = ["one page is one image; video and audio are not encoded"]
    if facts["delivery"] == "prompt":
        limits.append("run-batch can't serve it: its embeddings go into the prompt")
    if cpu_dtype is not None:
        limits.append(f"on CPU, vLLM runs it in {cpu_dtype} only")
    if facts["patches"]:
        limits.append("this package's plugin must be installed beside vLLM")
    limits += [f"vLLM can't be patched for it: {name}: {why}" for name, why in unfit.items()]
    if any(kind.startswith("F8") for kind in facts["tower"]["parameters_by_type"]):
        limits.append("the tower is stored in FP8 and computed in full, unlike natively in vLLM")
    return limits


# ---------------------------------------------------------------- for people


def _rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Label and text of each line."""
    from pipeline.checkpoint import first_names

    tower, processor = facts["tower"], facts["processor"]
    of_commit = f", commit {facts['revision']}" if facts["revision"] else ""
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in tower["parameters_by_type"].items())
    rows = [
        ("model", f"{facts['model']} ({facts['path']}{of_commit})"),
        ("family", facts["family"]),
        ("quantised", facts["quantisation"] or "no"),
        ("tower", f"{tower['class']}, {tower['parameters']:,} parameters ({kinds})"),
        ("", f"{_size(tower['bytes'])} in {tower['tensors']} tensors"),
        (
            "",
            f"on {len(tower['shards'])} of {tower['files']} files: {first_names(tower['shards'])}",
        ),
        ("fingerprint", tower["fingerprint"]),
        ("identity", facts["identity"]),
        ("processor", f"{processor['class']}, {processor['backend']}"),
        ("sizes", _geometry(facts["geometry"])),
        ("row", _row(facts)),
    ]
    rows += [(f"A4 {dpi} dpi", _page(dpi, page)) for dpi, page in facts["a4"].items()]
    rows += [("delivery", _delivery(facts)), ("drivers", ", ".join(facts["drivers"]))]
    for label, each in (
        ("vLLM", _flags(facts["engine_arguments"])),
        ("limits", facts["limits"]),
        ("warnings", facts["warnings"] or ["none"]),
    ):
        rows += [(label if number == 0 else "", text) for number, text in enumerate(each)]
    return rows


def _geometry(geometry: Mapping[str, Any]) -> str:
    words = [f"{name} {_number(value)}" for name, value in geometry.items() if name != "kind"]
    return f"{geometry['kind']}: {', '.join(words)}"


def _number(value: Any) -> str:
    return f"{value:,}" if type(value) is int else json.dumps(value)


def _row(facts: Mapping[str, Any]) -> str:
    layers, width = facts["deepstack_layers"], facts["row_width"]
    parts = f" = {facts['text_hidden_size']:,} x (1 + {layers} DeepStack layers)" if layers else ""
    return f"{width:,} values{parts}, {width * _ROW_VALUE_BYTES:,} bytes"


def _page(dpi: str, page: Mapping[str, Any]) -> str:
    height_px, width_px = _A4_PX[int(dpi)]
    tiles = f" in {page['tiles']} tiles" if page["tiles"] > 1 else ""
    return (
        f"{width_px} x {height_px} px, at the model {page['width_px']} x {page['height_px']} px"
        f"{tiles}: {page['tokens']:,} tokens, {_size(page['bytes'])}"
    )


def _delivery(facts: Mapping[str, Any]) -> str:
    patches = ", ".join(name.rpartition(".")[2] for name in facts["patches"])
    return facts["delivery"] + (f", the plugin patches {patches}" if patches else "")


def _flags(arguments: list[str]) -> list[str]:
    """One line per flag with its values."""
    lines: list[str] = []
    for word in arguments:
        if word.startswith("--") or not lines:
            lines.append(word)
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return lines


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
