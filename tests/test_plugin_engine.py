"""The plugin inside the real vLLM: embeddings with the tower absent answer as images do."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import makers_glm
import makers_qwen
import numpy as np
import plugin_parsers
import pytest
import torch
from checkpoints import make_qwen3_vl, write_json
from plugin_engine import ENVIRONMENT, ask
from plugin_pages import Embedding, ask_about, embed, embeds_part, page, rows_part

from pipeline.checkpoint import resolve_model
from pipeline.families import family_of
from pipeline.geometry import PixelBudget
from pipeline.keys import DecodeRules, EncodeSpec
from pipeline.plugin import (
    CONNECTOR,
    ENV_CACHE,
    ENV_TOWER,
    ENV_TOWER_REPORT,
    ENV_WIDTH,
    WORKER_EXTENSION,
    probe,
)
from pipeline.store import Entry, Store

pytestmark = pytest.mark.engine

SEED = 3
HIDDEN = 64
SAME, DIFFERENT = 1e-4, 1e-2  # log-probabilities of float32 engines
TOWER = "f" * 64
SPEC = EncodeSpec(
    family="qwen3_vl",
    processor="Qwen2VLImageProcessorFast",
    contract=1,
    geometry=PixelBudget(16, 2, 1024, 1048576),
    resample="bicubic",
    rescale_factor=1 / 255,
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
    precision="exact",
    dtype="float32",
    rules=DecodeRules("exif", "white", "8", "icc", "all", "rgb", "none"),
)
PAGES = {"a": page(1, 256, 192), "b": page(2, 192, 320)}
SETS = {"a": "a", "b": "b", "a+b": "ab"}  # pages of one request


# -- requests -----------------------------------------------------------------------------------


def image_part(name: str) -> dict[str, Any]:
    buffer = io.BytesIO()
    PAGES[name].save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def zero_deepstack(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows[:, :HIDDEN], torch.zeros_like(rows[:, HIDDEN:])], dim=1)


# -- what the engines are asked -----------------------------------------------------------------


class Shelf:
    """A cache of both pages, and of entries that a request must not get through with."""

    def __init__(self, root: Path, embeddings: dict[str, Embedding]) -> None:
        self.store = Store(root, TOWER)
        self.keys: dict[str, str] = {}
        self.grids = {name: grid for name, (_, grid) in embeddings.items()}
        for name, (rows, grid) in embeddings.items():
            self.put(name, rows, grid)
        rows, grid = embeddings["a"]
        self.put("narrow", rows[:, :HIDDEN], grid)
        self.put("flipped", rows, grid)
        path = self.store.path(self.keys["flipped"])
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        self.keys["missing"] = "0" * 64

    def put(self, name: str, rows: torch.Tensor, grid: list[int]) -> None:
        self.keys[name] = f"{len(self.keys) + 1:064x}"
        bits = rows.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
        entry = Entry.from_bits(
            bits,
            key=self.keys[name],
            spec=SPEC,
            tower_fingerprint=TOWER,
            grid=tuple(grid),
            source_size=(192, 256),
        )
        self.store.put(entry)

    def part(self, name: str, **more: Any) -> dict[str, Any]:
        grid = self.grids.get(name, self.grids["a"])
        return embeds_part(f"cache:{self.keys[name]}", grid) | more

    def requests(self) -> dict[str, Any]:
        """References of every kind, with good ones last: the engine must still be right then."""
        bad = {name: ask_about(self.part(name)) for name in ("flipped", "missing", "narrow")}
        bad["no key"] = ask_about(embeds_part("cache:../a", self.grids["a"]))
        good = {name: ask_about(*map(self.part, pages)) for name, pages in SETS.items()}
        return bad | good

    def environment(self) -> dict[str, str]:
        return {
            "VLLM_MEDIA_CONNECTOR": CONNECTOR,
            ENV_CACHE: str(self.store.root),
            ENV_TOWER: self.store.tower_fingerprint,
        }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3_vl(
        tmp_path_factory.mktemp("qwen3_vl") / "model", seed=SEED, dtype=torch.float32
    )


@pytest.fixture(scope="module")
def embeddings(checkpoint: Path) -> dict[str, Embedding]:
    return {name: embed(checkpoint, image) for name, image in PAGES.items()}


@pytest.fixture(scope="module")
def shelf(
    embeddings: dict[str, Embedding],
    tmp_path_factory: pytest.TempPathFactory,
) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("cache"), embeddings)


@pytest.fixture(scope="module")
def native(checkpoint: Path) -> dict[str, Any]:
    requests = {name: ask_about(*map(image_part, pages)) for name, pages in SETS.items()}
    return ask(checkpoint, requests, tower=True)


@pytest.fixture(scope="module")
def absent(checkpoint: Path, embeddings: dict[str, Embedding], shelf: Shelf) -> dict[str, Any]:
    rows, grid = embeddings["a"]
    halves = {name: (rows.to(torch.bfloat16), grid) for name, (rows, grid) in embeddings.items()}
    requests = shelf.requests() | {
        "uuid": ask_about(shelf.part("b", uuid=shelf.keys["b"])),
        "uuid again": ask_about(shelf.part("b", uuid=shelf.keys["b"])),
        "zeroed deepstack": ask_about(rows_part(zero_deepstack(rows), grid)),
        "main columns only": ask_about(rows_part(rows[:, :HIDDEN], grid)),
        "a row too few": ask_about(rows_part(rows[1:], grid)),
        "not finite": ask_about(rows_part(rows / 0, grid)),
        "three dimensions": ask_about(rows_part(rows[None], grid)),
        "an image": ask_about(image_part("a")),
    }
    for name, pages in SETS.items():
        parts = [rows_part(*embeddings[page]) for page in pages]
        requests[f"float32 {name}"] = ask_about(*parts)
        requests[f"bfloat16 {name}"] = ask_about(*[rows_part(*halves[page]) for page in pages])
    return ask(checkpoint, requests, tower=False, environment=shelf.environment())


@pytest.fixture(scope="module")
def batch(checkpoint: Path, shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's own batch runner over references: its output and the workers' reports."""
    directory = tmp_path_factory.mktemp("batch")
    sampling = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True, "logprobs": True}
    with (directory / "in.jsonl").open("w") as file:
        for name, messages in shelf.requests().items():
            body = {"model": str(checkpoint), "messages": messages, "return_token_ids": True}
            line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions"}
            file.write(json.dumps(line | {"body": body | sampling}) + "\n")
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.run_batch"),
        *("-i", directory / "in.jsonl", "-o", directory / "out.jsonl"),
        *("--model", checkpoint, "--dtype", "float32", "--max-model-len", "2048"),
        *("--enforce-eager", "--enable-mm-embeds", "--worker-extension-cls", WORKER_EXTENSION),
        *("--limit-mm-per-prompt", '{"image": 0, "video": 0}'),
    ]
    environment = os.environ | ENVIRONMENT | shelf.environment()
    environment[ENV_TOWER_REPORT] = str(directory / "towers")
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, cwd=directory
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return directory


# -- answers ------------------------------------------------------------------------------------


def furthest(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Largest log-probability difference of two answers; infinite where a token differs."""
    if first["tokens"] != second["tokens"]:
        return math.inf
    pairs = zip(first["logprobs"], second["logprobs"], strict=True)
    return max(abs(a - b) for a, b in pairs)


def test_embeddings_without_the_tower_answer_as_images_do(
    native: dict[str, Any], absent: dict[str, Any]
) -> None:
    expected = native["answers"]
    for name in SETS:
        assert furthest(absent["answers"][f"float32 {name}"], expected[name]) < SAME, name
    assert len({tuple(answer["tokens"]) for answer in expected.values()}) == len(SETS)


def test_references_answer_as_the_same_rows_inline(absent: dict[str, Any]) -> None:
    answers = absent["answers"]
    for name in SETS:
        assert furthest(answers[name], answers[f"bfloat16 {name}"]) < SAME, name
    assert furthest(answers["uuid"], answers["b"]) < SAME
    assert furthest(answers["uuid again"], answers["b"]) < SAME


def test_deepstack_rows_matter(native: dict[str, Any], absent: dict[str, Any]) -> None:
    assert furthest(absent["answers"]["zeroed deepstack"], native["answers"]["a"]) > DIFFERENT


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", f"bad_cache_entry:{'0' * 64}: there is no such entry"),
        ("flipped", "bad_cache_entry:{flipped}: "),
        ("no key", "bad_cache_reference: '../a' is no cache key"),
        ("narrow", "bad_embedding: image_embeds has 64 columns instead of 192"),
        ("main columns only", "bad_embedding: image_embeds has 64 columns instead of 192"),
        ("a row too few", "bad_embedding: image_embeds has 47 rows, image_grid_thw asks for 48"),
        ("not finite", "bad_embedding: image_embeds has values that are not finite"),
        ("three dimensions", "bad_embedding: "),
        ("an image", "At most 0 image(s) may be provided"),
    ],
)
def test_a_bad_part_costs_its_own_request_only(
    name: str, message: str, absent: dict[str, Any], shelf: Shelf
) -> None:
    assert absent["answers"][name]["error"].startswith(message.format(**shelf.keys))


def test_the_probe_tells_an_absent_tower_from_a_loaded_one(
    native: dict[str, Any], absent: dict[str, Any]
) -> None:
    (loaded,), (missing,) = native["reports"], absent["reports"]
    assert (missing["class"], missing["parameters"], missing["bytes"]) == (
        "StageMissingLayer",
        0,
        0,
    )
    assert loaded["class"] == "Qwen3_VisionTransformer"
    assert loaded["parameters"] > 10_000
    assert loaded["bytes"] == 4 * loaded["parameters"]
    assert missing["deepstack"] is loaded["deepstack"] is True


def test_the_batch_runner_answers_and_reports_alike(batch: Path, absent: dict[str, Any]) -> None:
    rows = [json.loads(line) for line in (batch / "out.jsonl").read_text().splitlines()]
    by_name = {row["custom_id"]: row for row in rows}
    for name in SETS:
        (choice,) = by_name[name]["response"]["body"]["choices"]
        assert choice["token_ids"] == absent["answers"][name]["tokens"], name
    for name in ("missing", "flipped", "no key", "narrow"):
        row = by_name[name]
        assert row["response"]["status_code"] == 400, row
        assert absent["answers"][name]["error"] in json.dumps(row, ensure_ascii=False)
    (report,) = probe.read_reports(batch / "towers")
    assert (report["class"], report["parameters"]) == ("StageMissingLayer", 0)


@pytest.mark.check
def test_moe_embeddings_without_the_tower_answer_as_images_do(tmp_path: Path) -> None:
    # a seed whose three answers differ; most random nets of this size repeat one token
    checkpoint = make_qwen3_vl(tmp_path / "model", seed=8, moe=True, dtype=torch.float32)
    embeddings = {name: embed(checkpoint, image) for name, image in PAGES.items()}
    images = {name: ask_about(*map(image_part, pages)) for name, pages in SETS.items()}
    embeds = {
        name: ask_about(*[rows_part(*embeddings[page]) for page in pages])
        for name, pages in SETS.items()
    }
    rows, grid = embeddings["a"]
    embeds["zeroed"] = ask_about(rows_part(zero_deepstack(rows), grid))
    native = ask(checkpoint, images, tower=True)
    absent = ask(checkpoint, embeds, tower=False)
    for name in SETS:
        assert furthest(absent["answers"][name], native["answers"][name]) < SAME, name
    assert furthest(absent["answers"]["zeroed"], native["answers"]["a"]) > DIFFERENT
    assert len({tuple(answer["tokens"]) for answer in native["answers"].values()}) == len(SETS)
    assert absent["reports"][0]["class"] == "StageMissingLayer"


# -- the other models of the Qwen-VL kind ---------------------------------------------------------

OURS = {
    "glm4v": makers_glm.make_glm4v,
    "glm_ocr": makers_glm.make_glm_ocr,
    "paddleocr_vl": makers_glm.make_paddleocr_vl,
}
STOCK = {
    "qwen2_vl": makers_qwen.make_qwen2_vl,
    "qwen2_5_vl": makers_qwen.make_qwen2_5_vl,
    "qwen3_5": makers_qwen.make_qwen3_5,
}
REFUSED = {"error": "bad_embedding: image_embeds has 8 columns instead of 64"}


def as_mixture(dense: Path, directory: Path) -> Path:
    """GLM-4.5V: the same classes of vLLM, but none of the models that the patch is for."""
    shutil.copytree(dense, directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "glm4v_moe", "architectures": ["Glm4vMoeForConditionalGeneration"]}
    config["vision_config"]["model_type"] = "glm4v_moe_vision"
    config["text_config"] |= {"model_type": "glm4v_moe_text", "n_routed_experts": 4}
    write_json(directory / "config.json", config)
    return directory


@pytest.mark.check
def test_parsers_are_replaced_and_guarded_where_they_should_be(tmp_path: Path) -> None:
    """Embeddings taken or not, in an engine of ours or in another's, by the real vLLM."""
    models = {name: make(tmp_path / name) for name, make in (OURS | STOCK).items()}
    models["glm4v_moe"] = as_mixture(models["glm4v"], tmp_path / "glm4v_moe")
    cases = [
        (name, embeds, width)
        for name in models
        for embeds in (True, False)
        for width in ("64", None)
    ]
    asked = [
        {"model": str(models[name]), "embeds": embeds, "width": width}
        for name, embeds, width in cases
    ]
    done = subprocess.run(
        [sys.executable, plugin_parsers.__file__, tmp_path / "results.json"],
        input=json.dumps(asked),
        env=os.environ | plugin_parsers.ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = dict(zip(cases, json.loads((tmp_path / "results.json").read_text()), strict=True))
    untouched = {"parser": "MultiModalDataParser", "narrow": "ImageProcessorItems"}
    for (name, embeds, width), result in found.items():
        if name in STOCK or (name in OURS and embeds):
            parsed = REFUSED if width else "DictEmbeddingItems"
            kind = "Qwen3VL" if name == "qwen3_5" else "Qwen2VL"  # derived from the other
            expected = {"parser": f"{kind}MultiModalDataParser", "narrow": parsed}
        else:
            expected = untouched
        assert result == expected, (name, embeds, width)


def rows_of(checkpoint: Path) -> dict[str, Embedding]:
    """Rows and grid of each page, as our tower makes them, in float32."""
    model = resolve_model(str(checkpoint))
    family = family_of(model)
    spec, tower = family.encode_spec(model), family.load_tower(model)
    found = {}
    for name, image in PAGES.items():
        rgb = np.asarray(image)
        place = spec.geometry.place(*rgb.shape[:2])
        found[name] = (tower.encode(family.resize(rgb, place, spec)), list(place.grid or ()))
    return found


def bad_parts(rows: torch.Tensor, grid: list[int]) -> dict[str, tuple[dict[str, Any], str]]:
    """Everything that vLLM takes and dies or lies of, and what we say to it."""
    _, height, width = grid
    poisoned = rows.clone()
    poisoned[3, 3] = math.nan
    more = rows_part(rows, grid)
    more["image_embeds"]["second"] = more["image_embeds"]["image_embeds"]
    count, columns = rows.shape
    return {
        "narrow": (rows_part(rows[:, :32], grid), f"has 32 columns instead of {columns}"),
        "wide": (rows_part(rows.repeat(1, 3), grid), f"has {3 * columns} columns instead of"),
        "a row too few": (rows_part(rows[1:], grid), f"has {count - 1} rows, image_grid_thw"),
        "a row too many": (rows_part(rows[[0, *range(count)]], grid), f"has {count + 1} rows"),
        "three dimensions": (rows_part(rows[None], grid), f"shape (1, {count}, {columns})"),
        "whole numbers": (rows_part(rows.to(torch.int8), grid), "is torch.int8"),
        "not finite": (rows_part(poisoned, grid), "has values that are not finite"),
        "two frames": (rows_part(rows, [2, height // 2, width]), "no grid of still images"),
        "odd grid": (rows_part(rows, [1, height * width, 1]), "no grid of still"),
        "another field": (more, "fields ['image_embeds', 'image_grid_thw', 'second']"),
    }


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("glm_ocr", marks=pytest.mark.check),
        pytest.param("glm4v", marks=pytest.mark.check),
        pytest.param("paddleocr_vl", marks=pytest.mark.check),
        pytest.param("qwen2_vl", marks=pytest.mark.check),
    ],
)
def test_bad_embeddings_cost_their_own_requests_only(name: str, tmp_path: Path) -> None:
    checkpoint = (OURS | STOCK)[name](tmp_path / name)
    embeddings = rows_of(checkpoint)
    good = {
        pages: ask_about(*[rows_part(*embeddings[page]) for page in pages])
        for pages in SETS.values()
    }
    bad = bad_parts(*embeddings["a"])
    family = family_of(resolve_model(str(checkpoint)))
    answers = ask(
        checkpoint,
        {f"before {pages}": messages for pages, messages in good.items()}
        | {what: ask_about(part) for what, (part, _) in bad.items()}
        | {f"after {pages}": messages for pages, messages in good.items()},
        tower=False,
        modalities=family.modalities,
        environment={ENV_WIDTH: str(embeddings["a"][0].shape[1])},
    )["answers"]
    for what, (_, message) in bad.items():
        assert answers[what]["error"].startswith("bad_embedding: "), what
        assert message in answers[what]["error"]
    for pages in good:
        assert furthest(answers[f"before {pages}"], answers[f"after {pages}"]) < SAME, pages
    assert len({tuple(answers[f"after {pages}"]["tokens"]) for pages in good}) == len(good)
