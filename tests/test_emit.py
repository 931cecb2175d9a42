"""A job carried away: lines that need neither cache nor page images, in bounded files."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_qwen3_vl
from click.testing import CliRunner
from conftest import Pipeline
from PIL import Image
from plugin_engine import ENVIRONMENT
from plugin_pages import page

from pipeline.cli.amounts import ByteSize
from pipeline.cli.emit import emit as emit_command
from pipeline.emit import EmitOptions, EmitReport, emit_job
from pipeline.encode import encode_pages
from pipeline.errors import Reason
from pipeline.run.images import PageOptions
from pipeline.store import Entry

MODEL_NAME = "carried"
SIZES = {"a.png": (256, 192), "b.png": (192, 320), "c.png": (250, 190)}
REQUESTS = {"a": ["a.png"], "b": ["b.png"], "c": ["c.png"], "b+a": ["b.png", "a.png"]}


class Job:
    """A checkpoint, three pages (one not of model size), their cache, a job of four requests."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / "job.jsonl"
        checkpoint = make_qwen3_vl(root / "model", seed=5, dtype=torch.float32)
        self.pages = PageOptions(cache=root / "cache", model=str(checkpoint))
        self.target = self.pages.target()
        for seed, (name, (width, height)) in enumerate(SIZES.items()):
            page(seed, 320, 320).crop((0, 0, width, height)).save(root / name)
        self.report = encode_pages([root / name for name in SIZES], self.target)
        self.keys = {good.path.name: good.key for good in self.report.good}
        self.write(REQUESTS)

    def write(self, requests: dict[str, list[str]]) -> None:
        with self.path.open("w") as file:
            for custom_id, names in requests.items():
                parts = [{"type": "image_url", "image_url": {"url": name}} for name in names]
                content = [{"type": "text", "text": "Read the page."}, *parts]
                body = {
                    "model": MODEL_NAME,
                    "messages": [{"role": "user", "content": content}],
                    "max_tokens": 16,
                    "temperature": 0.0,
                    "ignore_eos": True,
                    "return_token_ids": True,
                }
                line = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions"}
                file.write(json.dumps(line | {"body": body}) + "\n")

    def emit(self, out: Path, **options: Any) -> EmitReport:
        return emit_job(
            EmitOptions(job=self.path, out=out, pages=self.pages, quiet=True, **options)
        )

    def entry(self, name: str) -> Entry:
        entry = self.target.store.get(self.keys[name])
        assert isinstance(entry, Entry)
        return entry


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("emit"))


def lines_of(out: Path) -> dict[str, list[dict[str, Any]]]:
    """custom_id → image parts, over all files in order."""
    records = [
        json.loads(line)
        for path in sorted(out.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return {record["custom_id"]: record["body"]["messages"][0]["content"] for record in records}


def tensor_of(part: dict[str, Any]) -> tuple[torch.Tensor, list[int]]:
    assert part.keys() == {"type", "image_embeds"} and part["type"] == "image_embeds"
    data = base64.b64decode(part["image_embeds"]["image_embeds"], validate=True)
    tensor = torch.load(io.BytesIO(data), weights_only=True)
    assert len(data) < tensor.nbytes + 2000, "more than the tensor's own values was saved"
    return tensor, part["image_embeds"]["image_grid_thw"]


def test_each_page_stands_inline_in_its_place(job: Job, tmp_path: Path) -> None:
    report = job.emit(tmp_path)
    assert (report.requests, report.written, report.failed) == (4, 4, 0)
    lines = lines_of(tmp_path)
    assert list(lines) == list(REQUESTS)
    for custom_id, names in REQUESTS.items():
        text, *parts = lines[custom_id]
        assert text == {"type": "text", "text": "Read the page."}
        for name, part in zip(names, parts, strict=True):
            tensor, grid = tensor_of(part)
            assert tensor.dtype == torch.bfloat16 and tensor.is_contiguous()
            assert torch.equal(tensor, job.entry(name).tensor())
            assert grid == list(job.entry(name).footer.grid or ())


def test_a_file_holds_at_most_its_bytes_or_one_line(job: Job, tmp_path: Path) -> None:
    whole = job.emit(tmp_path)
    (shard,) = whole.shards
    assert shard.file == "job-00001.jsonl"
    sizes = [len(line) for line in (tmp_path / shard.file).read_bytes().splitlines(True)]
    limit = sizes[0] + sizes[1]
    assert limit < sizes[3] + sizes[2]
    report = job.emit(tmp_path, shard_bytes=limit)
    assert [shard.lines for shard in report.shards] == [2, 1, 1]
    assert [shard.bytes for shard in report.shards] == [limit, sizes[2], sizes[3]]
    assert [(tmp_path / shard.file).stat().st_size for shard in report.shards] == [
        shard.bytes for shard in report.shards
    ]
    report = job.emit(tmp_path, shard_bytes=1)
    assert [shard.lines for shard in report.shards] == [1, 1, 1, 1]


def test_files_of_an_earlier_emission_go_and_others_stay(job: Job, tmp_path: Path) -> None:
    job.emit(tmp_path, shard_bytes=1)
    (tmp_path / "job-notes.jsonl").write_text("")
    job.emit(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "job-00001.jsonl",
        "job-notes.jsonl",
    ]


def test_an_emission_that_stops_leaves_the_earlier_one(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.emit(tmp_path)
    before = (tmp_path / "job-00001.jsonl").read_bytes()

    def stop(entry: Entry) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.emit.embedded.inline", stop)
    with pytest.raises(KeyboardInterrupt):
        job.emit(tmp_path, shard_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["job-00001.jsonl"]
    assert (tmp_path / "job-00001.jsonl").read_bytes() == before


def test_a_request_that_fails_is_named_and_left_out(job: Job, tmp_path: Path) -> None:
    job.write({"a": ["a.png"], "lost": ["a.png", "none.png"]})
    try:
        for native in (False, True):
            report = job.emit(tmp_path / str(native), native=native)
            assert (report.requests, report.written, report.failed) == (2, 1, 1)
            (failure,) = report.failures
            assert (failure.custom_id, failure.reason) == ("lost", Reason.NOT_FOUND)
            assert list(lines_of(tmp_path / str(native))) == ["a"]
    finally:
        job.write(REQUESTS)


def test_a_damaged_entry_is_made_anew_or_refused_never_written(job: Job, tmp_path: Path) -> None:
    path = job.target.store.path(job.keys["a.png"])
    whole = path.read_bytes()
    expected = job.entry("a.png").tensor()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    path.write_bytes(damaged)
    report = job.emit(tmp_path / "refused", encode=False)
    assert {failure.custom_id for failure in report.failures} == {"a", "b+a"}
    assert {failure.reason for failure in report.failures} == {Reason.BAD_ENTRY}
    assert set(lines_of(tmp_path / "refused")) == {"b", "c"}
    report = job.emit(tmp_path / "anew")
    assert report.failed == 0
    tensor, _ = tensor_of(lines_of(tmp_path / "anew")["a"][1])
    assert torch.equal(tensor, expected)


def test_native_lines_hold_the_page_at_model_size(job: Job, tmp_path: Path) -> None:
    report = job.emit(tmp_path, native=True)
    assert report.written == 4
    part = lines_of(tmp_path)["c"][1]
    head, data = part["image_url"]["url"].split(",")
    assert head == "data:image/png;base64"
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
    source = np.asarray(Image.open(job.root / "c.png").convert("RGB"))
    assert source.shape == (190, 250, 3)
    expected = job.target.family.resize(
        source, job.target.spec.geometry.place(190, 250), job.target.spec
    )
    assert np.array_equal(pixels, expected)


@pytest.mark.parametrize(
    ("text", "size"),
    [("180MB", 180_000_000), ("64MiB", 64 << 20), ("1 gb", 10**9), ("77", 77), ("2kib", 2048)],
)
def test_sizes_are_read_in_decimal_and_binary_units(text: str, size: int) -> None:
    assert ByteSize().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["0", "-1", "12 pages", "", "1.5GB"])
def test_a_size_that_is_none_is_a_usage_error(text: str) -> None:
    done = CliRunner().invoke(emit_command, ["job.jsonl", "--out", "out", "--shard-bytes", text])
    assert done.exit_code == 2
    assert f"{text!r} is no size; examples: 180MB, 64MiB, 1000000" in done.output


def test_the_command_reports_and_exits_as_told(
    job: Job, tmp_path: Path, pipeline: Pipeline
) -> None:
    words = ["emit", job.path, "--out", tmp_path, "--cache", job.pages.cache, "--json"]
    done = pipeline(*words, "--model", job.pages.model, cwd=job.root)
    record = json.loads(done.stdout)
    size = (tmp_path / "job-00001.jsonl").stat().st_size
    assert record.pop("seconds") >= 0
    assert record == {
        "requests": 4,
        "written": 4,
        "failed": 0,
        "bytes": size,
        "shards": [{"file": "job-00001.jsonl", "lines": 4, "bytes": size}],
        "failures": [],
    }
    done = pipeline("emit", "none.jsonl", "--out", tmp_path, cwd=job.root, code=1)
    assert "can't read job file `none.jsonl`" in done.stderr


# -- on the real vLLM ---------------------------------------------------------------------------


def batch(job: Job, lines: Path, work: Path, *, images: int, plugins: str) -> dict[str, list[int]]:
    """vLLM's own batch runner over `lines`: custom_id → token ids."""
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.run_batch"),
        *("-i", lines, "-o", work / "answers.jsonl", "--model", job.pages.model),
        *("--served-model-name", MODEL_NAME, "--dtype", "float32", "--max-model-len", "2048"),
        *("--enforce-eager", "--enable-mm-embeds"),
        *("--limit-mm-per-prompt", json.dumps({"image": images, "video": 0})),
    ]
    environment = os.environ | ENVIRONMENT | {"VLLM_PLUGINS": plugins}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, cwd=work
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in (work / "answers.jsonl").read_text().splitlines()]
    return {row["custom_id"]: row["response"]["body"]["choices"][0]["token_ids"] for row in rows}


@pytest.fixture(scope="module")
def carried(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests of one page, embedded under their own names and native under `native NAME`."""
    out = tmp_path_factory.mktemp("carried")
    job.write({name: names for name, names in REQUESTS.items() if len(names) == 1})
    try:
        job.emit(out / "embedded")
        job.emit(out / "native", native=True)
    finally:
        job.write(REQUESTS)
    embedded = (out / "embedded" / "job-00001.jsonl").read_text()
    native = (out / "native" / "job-00001.jsonl").read_text()
    native = native.replace('{"custom_id": "', '{"custom_id": "native ')
    (out / "both.jsonl").write_text(embedded + native)
    return out


@pytest.fixture(scope="module")
def stock(job: Job, carried: Path) -> dict[str, list[int]]:
    """vLLM without our plugin, tower loaded, one image a prompt."""
    return batch(job, carried / "both.jsonl", carried, images=1, plugins="none")


@pytest.mark.engine
def test_a_stock_batch_runner_answers_embedded_lines_as_native_ones(
    stock: dict[str, list[int]],
) -> None:
    names = [name for name, pages in REQUESTS.items() if len(pages) == 1]
    assert set(stock) == {*names, *(f"native {name}" for name in names)}
    for name in names:
        assert stock[name] == stock[f"native {name}"], name
    assert len({tuple(stock[name]) for name in names}) == len(names)


@pytest.mark.engine
@pytest.mark.check
def test_without_the_tower_our_plugin_gives_the_same_answers(
    job: Job, carried: Path, stock: dict[str, list[int]], tmp_path: Path
) -> None:
    lines = carried / "embedded" / "job-00001.jsonl"
    answers = batch(job, lines, tmp_path, images=0, plugins="vlm_page_pipeline")
    assert answers == {name: stock[name] for name in answers}
    assert len(answers) == 3
