"""The main job on the real vLLM: cached embeddings in, answers out, tower absent."""

import base64
import io
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import COMMAND, Pipeline, accuracy, is_alive, results_of, texts_of, truth_of

pytestmark = pytest.mark.engine
PROMPT = "Read the page."


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, pipeline: Pipeline, render) -> Path:
    """A directory with pages of seed 9001, their cache, and a job that has been run once."""
    directory = tmp_path_factory.mktemp("run")
    render(9001, 100).rename(directory / "pages")
    words = ["encode", "pages", "--job", "job.jsonl", "--prompt", PROMPT, "--max-tokens", 128]
    done = pipeline(*words, "--json", cwd=directory)
    report = json.loads(done.stdout)
    assert (report["pages"], report["encoded"], report["skipped"]) == (100, 100, 1)
    done = pipeline("run", "job.jsonl", "--dtype", "float32", "--json", cwd=directory)
    (directory / "first.json").write_text(done.stdout)
    (directory / "first.err").write_text(done.stderr)
    return directory


def test_every_request_succeeds_with_the_tower_absent(work: Path) -> None:
    report = json.loads((work / "first.json").read_text())
    assert report["requests"] == report["succeeded"] == 100
    assert (report["reused"], report["failed"], report["engine_starts"]) == (0, 0, 1)
    journal = (work / "job.run" / "journal.jsonl").read_text().splitlines()
    (start,) = [json.loads(line) for line in journal if '"engine_start"' in line]
    (tower,) = start["towers"]
    assert (tower["class"], tower["parameters"]) == ("StageMissingLayer", 0)
    assert tower["deepstack"] is True
    assert (
        "vision tower not loaded (StageMissingLayer, 0 parameters)"
        in (work / "first.err").read_text()
    )


def test_pages_that_training_never_saw_are_read(work: Path) -> None:
    assert accuracy(texts_of(work / "job.jsonl"), truth_of(work / "pages")) >= 0.97


def test_a_result_is_a_batch_output_line_with_our_object(work: Path) -> None:
    record = results_of(work / "job.jsonl")["page-0000.png"]
    assert set(record) == {"id", "custom_id", "response", "error", "pipeline"}
    assert record["error"] is None
    assert record["response"]["status_code"] == 200
    assert record["response"]["body"]["usage"]["completion_tokens"] > 0
    assert set(record["pipeline"]) == {"identity", "attempts", "pages", "flags"}
    assert record["pipeline"]["pages"][0]["file"] == str(work / "pages" / "page-0000.png")


def test_a_second_run_starts_no_engine(work: Path, pipeline: Pipeline) -> None:
    done = pipeline("run", "job.jsonl", "--dtype", "float32", "--json", cwd=work)
    report = json.loads(done.stdout)
    assert (report["reused"], report["succeeded"], report["engine_starts"]) == (100, 0, 0)


def some_lines(work: Path, name: str, numbers: range, **changes: object) -> Path:
    """A job of some of the pages, its body changed."""
    lines = (work / "job.jsonl").read_text().splitlines()
    records = [json.loads(lines[number]) for number in numbers]
    for record in records:
        record["body"] |= changes
    (work / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return work / name


def test_bad_lines_and_bad_bytes_cost_nothing_else(work: Path, pipeline: Pipeline) -> None:
    """One engine for many faults: a flipped byte, a missing entry, unknown pages, bad lines."""
    before = texts_of(work / "job.jsonl")
    job = some_lines(work, "faults.jsonl", range(10), seed=1)
    too_long = json.loads(job.read_text().splitlines()[0])
    too_long["custom_id"], too_long["body"]["max_tokens"] = "too long", 100_000
    gone = json.loads(job.read_text().splitlines()[1])
    gone["custom_id"] = "gone"
    gone["body"]["messages"][0]["content"][1]["image_url"]["url"] = "pages/none.png"
    narrow = json.loads(job.read_text().splitlines()[2])
    narrow["custom_id"] = "narrow"
    narrow["body"]["messages"][0]["content"].append(inline_part(rows=4, width=128))
    with job.open("a") as file:
        for record in (too_long, gone, narrow):
            file.write(json.dumps(record) + "\n")
        file.write("not json\n")
    keys = {
        name: record["pipeline"]["pages"][0]["key"]
        for name, record in results_of(work / "job.jsonl").items()
    }
    flipped, deleted = (
        next((work / "cache").glob(f"v1/*/*/{keys[name]}.parquet"))
        for name in ("page-0003.png", "page-0004.png")
    )
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    deleted.unlink()

    done = pipeline("run", "faults.jsonl", "--dtype", "float32", "--json", cwd=work, code=3)

    report = json.loads(done.stdout)
    assert (report["requests"], report["succeeded"], report["failed"]) == (14, 10, 4)
    texts = texts_of(job)
    assert texts == {name: before[name] for name in texts}, "a flipped byte is never an answer"
    errors = [
        json.loads(line) for line in (work / "faults.run" / "errors.jsonl").read_text().splitlines()
    ]
    assert {error.get("custom_id"): (error["stage"], error["reason"]) for error in errors} == {
        "too long": ("engine", "rejected"),
        "gone": ("read", "not_found"),
        "narrow": ("validate", "bad_embedding"),
        None: ("validate", "bad_line"),
    }
    assert "faults.jsonl:14: not valid JSON" in done.stderr
    assert "faults.jsonl:13: content part 3: image_embeds has 128 columns instead of 384" in (
        done.stderr
    )
    assert len(list((work / "cache" / "quarantine").glob("*.parquet"))) == 1


def test_an_argument_that_vllm_refuses_is_a_usage_error(work: Path, pipeline: Pipeline) -> None:
    job = some_lines(work, "refused.jsonl", range(2), seed=4)
    done = pipeline("run", job.name, "--engine-arg", "nonsense=1", cwd=work, code=2)
    assert "vLLM refuses its arguments" in done.stderr
    assert "--nonsense" in done.stderr
    assert "engine died" not in done.stderr, "and it is not tried again"


def test_the_batch_runner_gives_the_same_texts(work: Path, pipeline: Pipeline) -> None:
    job = some_lines(work, "batch.jsonl", range(40), seed=2)
    words = ["--engine", "run-batch", "--dtype", "float32", "--json"]
    report = json.loads(pipeline("run", job.name, *words, cwd=work).stdout)
    assert (report["succeeded"], report["engine_starts"]) == (40, 1)
    assert texts_of(job) == {
        name: text for name, text in texts_of(work / "job.jsonl").items() if name in texts_of(job)
    }


def test_a_killed_run_leaves_no_process_and_its_rerun_does_the_rest(
    work: Path, pipeline: Pipeline
) -> None:
    job = some_lines(work, "killed.jsonl", range(60), min_tokens=100, max_tokens=100)
    words = ["run", job.name, "--dtype", "float32", "--max-num-seqs", "2", "--quiet"]
    results = job.with_suffix(".run") / "results.jsonl"
    with subprocess.Popen([*COMMAND, *words], cwd=work) as driver:
        try:
            wait_until(lambda: results.exists() and results.read_bytes().count(b"\n") >= 5)
            family = psutil.Process(driver.pid).children(recursive=True)
        finally:
            driver.send_signal(signal.SIGKILL)
    assert len(family) >= 3, "front end, engine core and worker were there"
    on_disk = results.read_bytes().count(b"\n")
    assert 5 <= on_disk < 60
    time.sleep(5)
    assert [process for process in family if is_alive(process)] == []

    report = json.loads(pipeline(*words[:-1], "--json", cwd=work).stdout)
    assert report["reused"] >= on_disk
    assert report["reused"] + report["succeeded"] == 60
    assert len(results_of(job)) == 60


def test_with_the_deepstack_rows_zeroed_reading_suffers(work: Path, pipeline: Pipeline) -> None:
    from pipeline.checkpoint import resolve_model
    from pipeline.encode import target_for
    from pipeline.store import Entry, Store

    target = target_for(resolve_model(None, None), work / "cache")
    hidden = target.family.text_hidden_size(target.model.config)
    zeroed = Store(work / "zeroed", target.store.tower_fingerprint)
    os.symlink(work / "cache/v1/documents", make(work / "zeroed/v1") / "documents")
    job = some_lines(work, "zeroed.jsonl", range(40), seed=3)
    for name in texts_of(work / "job.jsonl"):
        key = results_of(work / "job.jsonl")[name]["pipeline"]["pages"][0]["key"]
        entry = target.store.get(key)
        bits = entry.bits().copy()
        bits[:, hidden:] = 0
        assert bits[:, :hidden].any()
        zeroed.put(
            Entry.from_bits(
                bits,
                key=key,
                spec=target.spec,
                tower_fingerprint=target.store.tower_fingerprint,
                grid=entry.footer.grid,
                source_size=(entry.footer.source_height_px, entry.footer.source_width_px),
            )
        )
    pipeline("run", job.name, "--cache", "zeroed", "--dtype", "float32", cwd=work)
    truth = {name: text for name, text in truth_of(work / "pages").items() if name in texts_of(job)}
    whole = accuracy(texts_of(work / "job.jsonl"), truth)
    assert accuracy(texts_of(job), truth) < whole - 0.05


def inline_part(*, rows: int, width: int) -> dict:
    """Rows without their DeepStack columns: beside a whole page vLLM would pad them with zeros."""
    buffer = io.BytesIO()
    torch.save(torch.ones(rows, width, dtype=torch.bfloat16), buffer)
    inline = base64.b64encode(buffer.getvalue()).decode()
    return {
        "type": "image_embeds",
        "image_embeds": {"image_embeds": inline, "image_grid_thw": [1, 4, rows]},
    }


def make(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


def wait_until(condition, timeout_s: float = 300.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)
