"""Line 1: every page ends as encoded, cached or failed, and is encoded once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import load_weights, make_qwen3_vl, save_weights
from click.testing import CliRunner, Result
from PIL import Image

import pipeline.encode.reading as reading
from pipeline.checkpoint import resolve_model
from pipeline.cli import COMMANDS, main
from pipeline.encode import EncodeReport, Located, Locator, Target, encode_pages, target_for
from pipeline.errors import Failure, LockedError, Reason, StoreError, UsageError
from pipeline.geometry import Placement
from pipeline.store import Entry, Store
from pipeline.store.hold import hold_alone


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3_vl(tmp_path_factory.mktemp("encode") / "qwen3-vl")


@pytest.fixture
def target(checkpoint: Path, tmp_path: Path) -> Iterator[Target]:
    target = target_for(resolve_model(str(checkpoint)), tmp_path / "cache")
    yield target
    assert target.store.verify() == []


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """A PNG, a TIFF of three sizes and a file that is no page: four pages."""
    directory = tmp_path / "docs"
    directory.mkdir()
    noise(60, 90).save(directory / "a.png")
    frames = [noise(40 + 30 * number, 70, number) for number in range(3)]
    frames[0].save(directory / "b.tif", save_all=True, append_images=frames[1:])
    (directory / "notes.txt").write_text("no page")
    return directory


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def counts(report: EncodeReport) -> dict[str, int]:
    """The pages of a report that are not zero, by outcome."""
    assert report.pages == report.encoded + report.cached + report.failed
    assert report.failed == len(report.failures)
    assert len(report.good) == report.encoded + report.cached
    names = ("encoded", "cached", "failed", "skipped")
    return {name: getattr(report, name) for name in names if getattr(report, name)}


def entries(store: Store) -> dict[str, bytes]:
    """Every entry's file by key."""
    return {path.stem: path.read_bytes() for path in (store.root / "v1").rglob("*.parquet")}


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that are decoded from now on."""
    names: list[str] = []
    original = reading.DecodeRequest

    def watched(file: Any, *rest: Any) -> Any:
        names.append(file.path.name)
        return original(file, *rest)

    monkeypatch.setattr(reading, "DecodeRequest", watched)
    return names


# ---------------------------------------------------------------- encoded once


def test_every_page_is_encoded_and_a_second_run_encodes_nothing(
    target: Target, docs: Path, decoded: list[str]
) -> None:
    first = encode_pages([docs], target)
    assert counts(first) == {"encoded": 4, "skipped": 1}
    assert [(page.path.name, page.page, page.paged) for page in first.good] == [
        ("a.png", 1, False),
        ("b.tif", 1, True),
        ("b.tif", 2, True),
        ("b.tif", 3, True),
    ]
    assert first.tokens == sum(page.tokens for page in first.good)
    assert first.megapixels * 1e6 == first.tokens * 32 * 32
    assert first.bytes == sum(map(len, entries(target.store).values()))
    assert decoded == ["a.png", "b.tif"]

    second = encode_pages([docs], target)
    assert counts(second) == {"cached": 4, "skipped": 1}
    assert (second.megapixels, second.tokens, second.bytes) == (0, 0, 0)
    assert second.good == first.good
    assert decoded == ["a.png", "b.tif"]


def test_an_entry_is_what_the_tower_makes_of_the_page(target: Target, docs: Path) -> None:
    encode_pages([docs / "a.png"], target)
    (key,) = entries(target.store)
    entry = target.store.get(key)
    assert isinstance(entry, Entry)
    pixels = target.family.resize(
        np.asarray(noise(60, 90)), target.spec.geometry.place(60, 90), target.spec
    )
    rows = target.family.load_tower(target.model).encode(pixels)
    assert torch.equal(entry.tensor(), rows.to(torch.bfloat16))
    footer = entry.footer
    assert (footer.grid, footer.rows, footer.width) == ((1, 4, 6), 6, 192)
    assert (footer.source_height_px, footer.source_width_px) == (60, 90)
    assert "transformers" in footer.made_by and "model qwen3-vl" in footer.made_by


def test_an_entry_is_no_larger_than_its_page(target: Target, tmp_path: Path) -> None:
    """Not as large as what was in memory with it: the other pages of a call, a larger buffer."""
    docs = tmp_path / "docs"
    docs.mkdir()
    for number in range(8):
        noise(96 + 64 * number, 320, number).save(docs / f"{number}.png")
    report = encode_pages([docs], target)
    assert report.encoded == 8
    for page in report.good:
        size_bytes = target.store.path(page.key).stat().st_size
        assert size_bytes <= page.tokens * 192 * 2 + 8_000, page


def test_a_deleted_entry_is_encoded_again_and_only_it(
    target: Target, docs: Path, decoded: list[str]
) -> None:
    report = encode_pages([docs], target)
    before = entries(target.store)
    lost = report.good[2]
    target.store.path(lost.key).unlink()
    decoded.clear()
    assert counts(encode_pages([docs], target)) == {"encoded": 1, "cached": 3, "skipped": 1}
    assert decoded == [lost.path.name]
    assert entries(target.store).keys() == before.keys()
    again, entry = target.store.get(lost.key), before[lost.key]
    assert isinstance(again, Entry) and target.store.path(lost.key).read_bytes() == entry


def test_the_same_page_in_two_files_is_encoded_once(target: Target, docs: Path) -> None:
    noise(60, 90).save(docs / "copy.webp", lossless=True)
    report = encode_pages([docs], target)
    assert counts(report) == {"encoded": 4, "cached": 1, "skipped": 1}


def test_a_changed_file_is_encoded_again(target: Target, docs: Path) -> None:
    encode_pages([docs / "a.png"], target)
    noise(60, 90, seed=5).save(docs / "a.png")
    assert counts(encode_pages([docs / "a.png"], target)) == {"encoded": 1}


def test_what_is_stored_does_not_depend_on_the_other_pages(
    target: Target, docs: Path, tmp_path: Path
) -> None:
    encode_pages([docs], target)
    alone = replace(target, store=replace(target.store, root=tmp_path / "alone"))
    for name in ("b.tif", "a.png"):
        encode_pages([docs / name], alone)
    assert entries(alone.store) == entries(target.store)


def test_other_rules_or_weights_never_hit(
    target: Target, docs: Path, checkpoint: Path, tmp_path: Path
) -> None:
    encode_pages([docs], target)
    model = target.model
    larger = target_for(model, target.store.root, min_pixels=10_000)
    assert counts(encode_pages([docs / "a.png"], larger)) == {"encoded": 1}
    weights = load_weights(make_qwen3_vl(tmp_path / "other"))
    weights["model.visual.merger.linear_fc2.bias"] += 1
    save_weights(tmp_path / "other", weights, 2)
    other = target_for(resolve_model(str(tmp_path / "other")), target.store.root)
    assert counts(encode_pages([docs / "a.png"], other)) == {"encoded": 1}
    assert counts(encode_pages([docs], target)) == {"cached": 4, "skipped": 1}


def test_only_the_asked_pages_of_a_file_are_encoded(
    target: Target, docs: Path, decoded: list[str]
) -> None:
    path = docs / "b.tif"
    first = encode_pages([path], target, only={path: frozenset({2, 9})})
    assert counts(first) == {"encoded": 1, "failed": 1}
    assert [page.page for page in first.good] == [2]
    assert (first.failures[0].page, first.failures[0].reason) == (9, Reason.NO_SUCH_PAGE)
    second = encode_pages([path], target, only={path: frozenset({1, 2, 9})})
    assert counts(second) == {"encoded": 1, "cached": 1, "failed": 1}
    assert counts(encode_pages([path], target, only={path: None})) == {"encoded": 1, "cached": 2}


def test_a_manifest_of_another_decoder_is_replaced(target: Target, docs: Path) -> None:
    """Its pixel digests lead to entries that no run would ever make."""
    path = docs / "a.png"
    encode_pages([path], target)
    (manifest_path,) = (target.store.root / "v1" / "documents").rglob("*.json")
    record = json.loads(manifest_path.read_text())
    record["pages"][0]["pixels"] = "0" * 64
    manifest_path.write_text(json.dumps(record))
    assert counts(encode_pages([path], target)) == {"cached": 1}
    assert counts(encode_pages([path], target)) == {"cached": 1}
    assert json.loads(manifest_path.read_text())["pages"][0]["pixels"] != "0" * 64


# ---------------------------------------------------------------- failures


def test_bad_pages_fail_and_the_rest_goes_on(target: Target, docs: Path) -> None:
    (docs / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    Image.new("L", (8, 8192)).save(docs / "narrow.png")
    cut = (docs / "a.png").read_bytes()[:4000]
    (docs / "cut.png").write_bytes(cut)
    for _ in range(2):  # from decoding, and from manifests
        report = encode_pages([docs, docs / "missing.pdf"], target)
        assert report.failed == 4 and report.encoded + report.cached == 4
        seen = [(Path(str(f.file)).name, f.page, f.reason.value) for f in report.failures]
        assert sorted(seen, key=str) == [
            ("broken.png", None, "corrupt"),
            ("cut.png", None, "truncated"),
            ("missing.pdf", None, "not_found"),
            ("narrow.png", 1, "aspect_ratio"),
        ]
    assert "1024.0" in next(f.detail for f in report.failures if f.reason == "aspect_ratio")


def test_known_bad_files_are_not_decoded_again(
    target: Target, docs: Path, decoded: list[str]
) -> None:
    Image.new("L", (8, 8192)).save(docs / "narrow.png")
    (docs / "cut.png").write_bytes((docs / "a.png").read_bytes()[:4000])
    encode_pages([docs], target)
    decoded.clear()
    encode_pages([docs], target)
    assert decoded == []


class BadTower:
    """A tower whose output for the first page is bad."""

    def __init__(self, tower: Any, bad: Any) -> None:
        self.tower, self.bad = tower, [bad]

    def encode(self, pixels: np.ndarray) -> torch.Tensor:
        rows: torch.Tensor = self.tower.encode(pixels).clone()
        return self.bad.pop()(rows) if self.bad else rows


def overflow(rows: torch.Tensor) -> torch.Tensor:
    rows[0, 0] = float("nan")
    return rows


def out_of_memory(rows: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("can't allocate memory")


@pytest.mark.parametrize(
    ("bad", "reason"), [(overflow, Reason.NOT_FINITE), (out_of_memory, Reason.TOWER_ERROR)]
)
def test_a_bad_embedding_costs_its_page_and_is_not_stored(
    target: Target, docs: Path, bad: Any, reason: Reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(target.family)
    original = kind.load_tower
    with monkeypatch.context() as patch:
        patch.setattr(kind, "load_tower", lambda *args: BadTower(original(*args), bad))
        report = encode_pages([docs], target)
    assert counts(report) == {"encoded": 3, "failed": 1, "skipped": 1}
    assert report.failures[0].reason is reason
    assert len(entries(target.store)) == 3
    assert counts(encode_pages([docs], target)) == {"encoded": 1, "cached": 3, "skipped": 1}


def test_a_page_that_memory_does_not_hold_at_model_size_costs_itself(
    target: Target, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(target.family)
    original = kind.resize

    def resize(family: Any, rgb: Any, placement: Placement, spec: Any) -> Any:
        if placement.height_px == 64:
            raise RuntimeError("can't allocate memory\nException raised from alloc_cpu")
        return original(family, rgb, placement, spec)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "resize", resize)
        report = encode_pages([docs], target)
    failure = report.failures[0]
    assert (failure.reason, failure.detail) == (Reason.TOWER_ERROR, "can't allocate memory")
    assert failure.retryable
    assert counts(encode_pages([docs], target)).keys() == {"encoded", "cached", "skipped"}


def test_a_cache_that_cannot_be_written_stops_the_run(
    target: Target, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match="No space left on device"):
            encode_pages([docs], target)
    assert counts(encode_pages([docs], target)) == {"encoded": 4, "skipped": 1}


def test_a_file_that_changes_meanwhile_is_a_failure_and_gets_no_manifest(
    target: Target, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = reading.DecodeRequest

    def rewriting(file: Any, *rest: Any) -> Any:
        os.utime(file.path, (1, 1))
        return original(file, *rest)

    monkeypatch.setattr(reading, "DecodeRequest", rewriting)
    report = encode_pages([docs / "a.png"], target)
    assert [failure.detail for failure in report.failures] == ["the file changed while it was read"]
    assert not list(target.store.root.rglob("*.json"))


@pytest.mark.parametrize("option", [{"precision": "int3"}])
def test_settings_that_cannot_be_meant_are_usage_errors(
    checkpoint: Path, tmp_path: Path, option: dict[str, Any]
) -> None:
    with pytest.raises(UsageError):
        target_for(resolve_model(str(checkpoint)), tmp_path, **option)


def test_equal_pages_of_one_call_are_encoded_once(target: Target, tmp_path: Path) -> None:
    """However far pages are decoded ahead of the tower."""
    directory = tmp_path / "equal"
    directory.mkdir()
    for number in range(6):
        noise(60, 90).save(directory / f"{number}.png", compress_level=number)
    noise(60, 90).save(directory / "7.tif", save_all=True, append_images=[noise(60, 90)] * 3)
    report = encode_pages([directory], target)
    assert counts(report) == {"encoded": 1, "cached": 9}


def test_encoding_holds_the_cache(target: Target, docs: Path) -> None:
    """Nothing sweeps it meanwhile."""
    root, held = target.store.root, []

    def watch(outcomes: Any, found: Any) -> Any:
        for outcome in outcomes:
            with pytest.raises(LockedError), hold_alone(root):
                pass
            held.append(outcome)
            yield outcome

    assert encode_pages([docs], target, watch=watch).encoded == len(held) == 4
    with hold_alone(root):
        pass


# ---------------------------------------------------------------- locating


def locator_of(target: Target) -> Locator:
    return Locator(target)


def test_a_located_page_is_the_entry_that_encode_wrote(target: Target, docs: Path) -> None:
    assert locator_of(target).locate(docs / "b.tif", 2) is None
    report = encode_pages([docs], target)
    locator = locator_of(target)
    for page in report.good:
        found = locator.locate(page.path, page.page)
        assert isinstance(found, Located) and not found.partial
        assert (found.footer.key, found.footer.rows) == (page.key, page.tokens)
    target.store.path(report.good[0].key).unlink()
    assert locator.locate(docs / "a.png", 1) is None


def test_what_cannot_be_located_says_why(target: Target, docs: Path) -> None:
    Image.new("L", (8, 8192)).save(docs / "narrow.png")
    (docs / "cut.png").write_bytes((docs / "a.png").read_bytes()[:4000])
    encode_pages([docs], target)
    found = {
        name: locator_of(target).locate(docs / name, page)
        for name, page in [("gone.png", 1), ("narrow.png", 1), ("cut.png", 1), ("b.tif", 4)]
    }
    reasons = {name: f.reason for name, f in found.items() if isinstance(f, Failure)}
    assert reasons == {
        "gone.png": Reason.NOT_FOUND,
        "narrow.png": Reason.ASPECT_RATIO,
        "cut.png": Reason.TRUNCATED,
        "b.tif": Reason.NO_SUCH_PAGE,
    }


def test_a_page_that_changed_is_not_located(target: Target, docs: Path) -> None:
    encode_pages([docs], target)
    locator = locator_of(target)
    assert isinstance(locator.locate(docs / "a.png", 1), Located)
    noise(60, 91, seed=3).save(docs / "a.png")
    assert locator.locate(docs / "a.png", 1) is None


def test_a_damaged_entry_is_quarantined_and_encoded_again(target: Target, docs: Path) -> None:
    report = encode_pages([docs / "a.png"], target)
    path = target.store.path(report.good[0].key)
    path.write_bytes(path.read_bytes()[:-20])
    assert locator_of(target).locate(docs / "a.png", 1) is None
    assert len(list((target.store.root / "quarantine").glob("*.parquet"))) == 1
    assert counts(encode_pages([docs / "a.png"], target)) == {"encoded": 1}
    assert isinstance(locator_of(target).locate(docs / "a.png", 1), Located)


# ---------------------------------------------------------------- the command


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_the_command_reports_in_json(target: Target, docs: Path) -> None:
    (docs / "cut.png").write_bytes((docs / "a.png").read_bytes()[:4000])
    common = ("encode", docs, "--model", target.model.path, "--cache", target.store.root, "--json")
    result = run(*common)
    report = json.loads(result.stdout)
    assert result.exit_code == 3, result.stderr
    assert list(report) == [
        *("pages", "encoded", "cached", "failed", "skipped", "seconds"),
        *("megapixels", "tokens", "bytes", "failures", "stopped"),
    ]
    assert (report["pages"], report["encoded"], report["failed"], report["skipped"]) == (5, 4, 1, 1)
    (failure,) = report["failures"]
    assert failure == {
        "file": str(docs / "cut.png"),
        "page": None,
        "stage": "decode",
        "reason": "truncated",
        "detail": failure["detail"],
        "attempts": 1,
        "retryable": False,
    }
    (docs / "cut.png").unlink()
    again = run(*common)
    assert again.exit_code == 0 and json.loads(again.stdout)["cached"] == 4


def test_failures_stand_on_stderr_with_a_hint(target: Target, docs: Path) -> None:
    result = run(
        "encode",
        docs / "gone.png",
        docs / "a.png",
        "--model",
        target.model.path,
        "--cache",
        target.store.root,
    )
    assert result.exit_code == 3
    tower, *rest = result.stderr.splitlines()
    assert tower.startswith("tower: float32 (exact; ")
    assert rest == [
        f"failed: {docs / 'gone.png'}: read/not_found: no such file",
        "hint: not_found: check the name",
    ]
    assert result.stdout.startswith("2 pages: 1 encoded, 0 cached, 1 failed; 0 files skipped; ")


def test_the_bundled_model_is_said_in_one_line(docs: Path, tmp_path: Path) -> None:
    result = run("encode", docs / "a.png", "--cache", tmp_path / "bundled")
    assert result.exit_code == 0, result.stderr
    model, tower = result.stderr.splitlines()
    assert model == "model: bundled tiny-reader"
    assert tower.startswith("tower: float32 (exact; ") and "one per physical core" in tower
    again = run("encode", docs / "a.png", "--cache", tmp_path / "bundled")
    assert again.stderr == "model: bundled tiny-reader\n", "nothing is encoded, nothing is said"
    quiet = run("encode", docs / "a.png", "--cache", tmp_path / "bundled", "--quiet")
    assert (quiet.exit_code, quiet.output) == (0, "")


def test_a_job_lists_the_good_pages_in_order(target: Target, docs: Path, tmp_path: Path) -> None:
    (docs / "cut.png").write_bytes((docs / "a.png").read_bytes()[:4000])
    (tmp_path / "prompt.txt").write_text("Read the page.\n")
    job = tmp_path / "jobs" / "pages.jsonl"
    result = run(
        "encode",
        docs,
        "--model",
        target.model.path,
        "--cache",
        target.store.root,
        "--job",
        job,
        "--prompt",
        tmp_path / "prompt.txt",
        "--max-tokens",
        7,
    )
    assert result.exit_code == 3, result.stderr
    lines = [json.loads(line) for line in job.read_text().splitlines()]
    parts = [line["body"]["messages"][0]["content"] for line in lines]
    assert [part["image_url"]["url"] for _, part in parts] == [
        "../docs/a.png",
        "../docs/b.tif#page=1",
        "../docs/b.tif#page=2",
        "../docs/b.tif#page=3",
    ]
    assert {text["text"] for text, _ in parts} == {"Read the page."}
    assert {line["body"]["max_tokens"] for line in lines} == {7}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--job", "job.jsonl"], "Error: `--job` needs a prompt\n\nhint: add `--prompt TEXT` or"),
        (["--max-pixels", "10"], "Error: min_pixels 1024 is above max_pixels 10\n\nhint: "),
        (["--model", "nowhere"], "Error: no model directory `nowhere`\n\nhint: give a directory"),
        (["--precision", "int3"], "Invalid value for '--precision'"),
    ],
)
def test_wrong_options_end_with_a_message(docs: Path, arguments: list[str], message: str) -> None:
    result = run("encode", docs, *arguments)
    assert result.exit_code == (1 if "--model" in arguments else 2)
    assert message in result.stderr


def test_a_job_that_cannot_be_written_is_an_error(
    target: Target, docs: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    result = run(
        "encode",
        docs / "a.png",
        "--model",
        target.model.path,
        "--cache",
        target.store.root,
        "--job",
        tmp_path / "file" / "job.jsonl",
        "--prompt",
        "Read.",
    )
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: can't write `{tmp_path / 'file' / 'job.jsonl'}`: ")


def test_a_job_replaces_no_page(docs: Path, tmp_path: Path) -> None:
    page = docs / "a.png"
    before = page.read_bytes()
    result = run("encode", docs, "--cache", tmp_path / "cache", "--job", page, "--prompt", "Read.")
    assert result.exit_code == 1
    assert result.stderr.startswith(
        f"Error: `{page}` is there already and is no job file\n\nhint: "
    )
    assert page.read_bytes() == before and not (tmp_path / "cache").exists()


def test_a_prompt_that_is_no_text_is_refused(docs: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"\xff")
    for prompt in ("bad \udcff", tmp_path / "prompt.txt"):
        result = run("encode", docs, "--job", tmp_path / "job.jsonl", "--prompt", prompt)
        assert result.exit_code == 2 and "can't read the prompt" in result.stderr


@pytest.mark.parametrize("content", ["[1", "[]", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 100_000])
def test_a_schema_is_checked_before_anything_is_encoded(
    docs: Path, tmp_path: Path, content: str
) -> None:
    (tmp_path / "schema.json").write_text(content)
    result = run(
        "encode",
        docs,
        "--cache",
        tmp_path / "cache",
        "--job",
        tmp_path / "job.jsonl",
        "--prompt",
        "Read.",
        "--schema",
        tmp_path / "schema.json",
    )
    assert result.exit_code == 2 and "the schema `" in result.stderr
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_is_a_file_is_an_error(target: Target, docs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    arguments = ("encode", docs / "a.png", "--model", target.model.path, "--cache")
    assert run(*arguments, tmp_path / "file").exit_code == 2
    result = run(*arguments, tmp_path / "file" / "cache")
    assert result.exit_code == 1 and "Error: can't write `" in result.stderr


def test_pages_lists_sizes_and_refusals(target: Target, docs: Path) -> None:
    Image.new("L", (8, 8192)).save(docs / "narrow.png")
    (docs / "cut.png").write_bytes((docs / "a.png").read_bytes()[:4000])
    result = run("pages", docs, "--model", target.model.path, "--json")
    record = json.loads(result.stdout)
    assert result.exit_code == 3 and record["skipped"] == 1
    assert record["pages"][0] == {
        "file": str(docs / "a.png"),
        "page": 1,
        "width_px": 90,
        "height_px": 60,
        "model_width_px": 96,
        "model_height_px": 64,
        "tokens": 6,
        "reason": None,
        "detail": None,
    }
    rest = {Path(page["file"]).name: page["reason"] for page in record["pages"][1:]}
    assert rest == {"b.tif": None, "cut.png": "truncated", "narrow.png": "aspect_ratio"}
    table = run("pages", docs / "a.png", "--model", target.model.path)
    assert table.stdout == (
        f"{docs / 'a.png'}#1: 90 x 60 px, at the model 96 x 64 px, 6 tokens\n"
        "1 page, 0 files skipped\n"
    )


def test_pages_and_encode_agree(target: Target, docs: Path) -> None:
    listed = json.loads(run("pages", docs, "--model", target.model.path, "--json").stdout)
    report = encode_pages([docs], target)
    assert [page["tokens"] for page in listed["pages"]] == [page.tokens for page in report.good]


def test_a_rerun_of_known_pages_imports_no_torch(target: Target, docs: Path) -> None:
    arguments = ["encode", str(docs), "--model", str(target.model.path)]
    arguments += ["--cache", str(target.store.root), "--json"]
    assert run(*arguments).exit_code == 0
    code = (
        "import sys\nfrom pipeline.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'pyarrow', 'tqdm', 'PIL', 'pypdfium2'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cached"] == 4


@pytest.mark.parametrize(
    "command", ["", *(name for name in COMMANDS if name in ("encode", "pages"))]
)
def test_every_help_has_an_example(command: str) -> None:
    result = run(*([command] if command else []), "--help")
    assert result.exit_code == 0 and "Example:" in result.output


def test_an_interrupt_ends_with_its_own_code(
    docs: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.cli.encoding.encode_pages", interrupted)
    result = run("encode", docs, "--model", target.model.path, "--cache", target.store.root)
    assert result.exit_code == 4
    assert result.stderr == (
        "Error: stopped by a signal\n\nhint: the same command goes on where this one stopped\n"
    )


def test_traps_of_a_checkpoint_are_said_by_name(
    checkpoint: Path, docs: Path, tmp_path: Path
) -> None:
    """vLLM's native path would feed raw pixels to the tower of such a model."""
    trapped = shutil.copytree(checkpoint, tmp_path / "trapped")
    path = trapped / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    del settings["image_mean"], settings["image_std"]
    path.write_text(json.dumps(settings))
    words = ("encode", docs / "a.png", "--model", trapped, "--cache", tmp_path / "cache")
    assert "warning: `trapped`: the image processor's JSON has no image_mean" in run(*words).stderr
    assert run(*words, "--quiet").stderr == ""
