"""A run's answers in the order of its job: rows, documents, tables."""

from __future__ import annotations

import csv
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from pipeline.cli import main
from pipeline.results import open_results

LOOP = ["repetition"]


def line(name: str, *pages: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": page}} for page in pages]
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Read."}, *parts]}]}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def answer(name: str, *texts: str | None, pages: Any = (), flags: Any = ()) -> dict[str, Any]:
    choices = [
        {"index": number, "finish_reason": "stop", "message": {"content": text}}
        for number, text in enumerate(texts)
    ]
    usage = {"prompt_tokens": 10, "completion_tokens": 2}
    return {
        "custom_id": name,
        "response": {"status_code": 200, "body": {"choices": choices[::-1], "usage": usage}},
        "error": None,
        "pipeline": {
            "identity": "i",
            "attempts": 1,
            "pages": [{"file": file, "page": page, "key": "k"} for file, page in pages],
            "flags": list(flags),
        },
    }


def failure(name: str | None, file: str | None = None, page: int | None = None) -> dict[str, Any]:
    return {
        "custom_id": name, "file": file, "page": page, "stage": "engine", "reason": "rejected",
        "detail": "too long", "attempts": 2, "retryable": False,
    }  # fmt: skip


class Job:
    def __init__(self, root: Path) -> None:
        self.path, self.run = root / "job.jsonl", root / "job.run"
        self.run.mkdir()

    def write(
        self,
        lines: list[dict[str, Any]],
        answers: list[dict[str, Any]],
        errors: list[dict[str, Any]] | None = None,
        *,
        before: bytes = b"",
        end: bytes = b"\n",
        torn: bytes = b"",
    ) -> None:
        dumped = [json.dumps(each).encode() for each in lines]
        self.path.write_bytes(before + b"".join(each + end for each in dumped))
        whole = b"".join(json.dumps(each).encode() + b"\n" for each in answers)
        (self.run / "results.jsonl").write_bytes(whole + torn)
        text = "".join(json.dumps(each) + "\n" for each in errors or [])
        (self.run / "errors.jsonl").write_text(text)

    def call(self, *words: object, code: int = 0) -> Result:
        done = CliRunner().invoke(main, ["results", str(self.path), *map(str, words)])
        assert done.exit_code == code, (done.output, done.exception)
        return done

    def records(self, *words: object, code: int = 0) -> list[dict[str, Any]]:
        done = self.call(*words, "--quiet", code=code)
        return [json.loads(each) for each in done.stdout.splitlines()]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    for name in ("a.png", "b.pdf", "c.png"):
        (tmp_path / name).touch()
    return Job(tmp_path)


def test_rows_come_in_the_order_of_the_job_whatever_became_of_them(job: Job) -> None:
    job.write(
        [line("a", "a.png"), line("b", "b.pdf#page=2"), line("c", "c.png"), line("d"), {"x": 1}],
        [answer("d", "text only"), answer("a", "A", "A2", pages=[("/a.png", 1)]), answer("e", "?")],
        [failure("b", str(job.path.parent / "b.pdf"), 2)],
    )
    rows = job.records(code=3)
    assert [(row["custom_id"], row["status"], row["text"]) for row in rows] == [
        ("a", "ok", "A"),
        ("b", "failed", None),
        ("c", "pending", None),
        ("d", "ok", "text only"),
        (None, "failed", None),
    ]
    assert rows[0]["choices"] == ["A", "A2"], "in the order of their index"
    assert (rows[0]["prompt_tokens"], rows[0]["completion_tokens"]) == (10, 2)
    assert (rows[1]["reason"], rows[1]["detail"], rows[1]["page"]) == (
        "engine/rejected", "too long", 2,
    )  # fmt: skip
    assert rows[2]["pages"] == [{"file": str(job.path.parent / "c.png"), "page": 1}]
    assert f"{job.path}:5: custom_id must be a non-empty string" in rows[4]["detail"]
    said = job.call(code=3).stderr
    assert "2 ok, 0 flagged, 2 failed, 1 pending" in said
    assert "1 more in results.jsonl, whose lines left the job" in said


def test_all_answered_is_exit_code_0_and_a_loop_is_not(job: Job) -> None:
    job.write([line("a"), line("b")], [answer("a", "A"), answer("b", "B", flags=["truncated"])])
    assert [row["status"] for row in job.records()] == ["ok", "ok"]
    job.write([line("a")], [answer("a", "A", flags=LOOP)])
    assert [row["status"] for row in job.records(code=3)] == ["flagged"]
    assert job.records("--status", "ok", code=3) == []


def test_a_torn_line_is_pending_and_marks_and_line_ends_do_no_harm(job: Job) -> None:
    torn = json.dumps(answer("b", "ü" * 9)).encode()[:60]
    job.write(
        [line("a"), line("b")], [answer("a", "A")], torn=torn, before=b"\xef\xbb\xbf", end=b"\r\n\n"
    )
    rows = job.records(code=3)
    assert [(row["custom_id"], row["status"]) for row in rows] == [("a", "ok"), ("b", "pending")]


def test_a_job_that_was_never_run_says_how_to(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text("{}\n")
    done = CliRunner().invoke(main, ["results", str(tmp_path / "other.jsonl")])
    assert done.exit_code == 1 and "has not been run" in done.output
    assert "hint: pipeline run" in done.output


@pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl"])
def test_a_table_by_its_ending(job: Job, ending: str) -> None:
    job.write([line("a", "a.png"), line("b")], [answer("a", "=1+1\nx", pages=[("/a.png", 1)])])
    output = job.path.parent / f"out.{ending}"
    totals = json.loads(job.call("-o", output, "--json", code=3).stdout)
    assert totals == {"rows": 2, "ok": 1, "flagged": 0, "failed": 0, "pending": 1}
    if ending == "csv":
        with output.open(newline="") as file:
            rows: list[dict[str, Any]] = list(csv.DictReader(file))
        assert rows[0]["text"] == "'=1+1\nx", "no formula"
        assert json.loads(rows[0]["pages"]) == [{"file": "/a.png", "page": 1}]
        assert (rows[1]["status"], rows[1]["text"], rows[1]["prompt_tokens"]) == ("pending", "", "")
    elif ending == "parquet":
        rows = pq.read_table(output).to_pylist()
        assert rows[0]["text"] == "=1+1\nx" and rows[0]["prompt_tokens"] == 10
        assert rows[0]["pages"] == [{"file": "/a.png", "page": 1}] and rows[1]["text"] is None
    else:
        rows = [json.loads(each) for each in output.read_text().splitlines()]
        assert rows[0]["file"] == "/a.png" and rows[1]["file"] is None
    assert not list(job.path.parent.glob(".*.tmp"))


INVOICES = ['{"total": 1, "paid": true, "who": "x"}', '```json\n{"total": 2.5, "lines": [1]}\n```',
            "sorry", '{"status": "new", "lines": "none"}', "[1]"]  # fmt: skip


def test_fields_of_json_answers_become_columns(job: Job) -> None:
    job.write(
        [line(str(number)) for number in range(5)],
        [answer(str(number), text) for number, text in enumerate(INVOICES)],
    )
    output = job.path.parent / "out.parquet"
    job.call("-o", output, "--json-columns")
    table = pq.read_table(output)
    types = {name: str(table.schema.field(name).type) for name in ("total", "paid", "who", "lines")}
    assert types == {"total": "double", "paid": "bool", "who": "string", "lines": "string"}
    rows = table.to_pylist()
    assert [row["total"] for row in rows] == [1.0, 2.5, None, None, None]
    assert [row["lines"] for row in rows] == [None, "[1]", None, "none", None]
    assert [row["json_status"] for row in rows][3] == "new", "a field does not hide our column"
    assert [row["status"] for row in rows] == ["ok"] * 5
    assert [row["flags"] for row in rows] == [[], [], ["not_json"], [], ["not_json"]]
    (first, *_) = job.records("--json-columns")
    assert first["parsed"] == {"total": 1, "paid": True, "who": "x"}
    job.call("-o", job.path.parent / "out.csv", "--json-columns")
    with (job.path.parent / "out.csv").open(newline="") as file:
        assert [row["paid"] for row in csv.DictReader(file)] == ["true", "", "", "", ""]


def test_pages_of_a_document_are_joined_in_their_order(job: Job) -> None:
    pdf = str(job.path.parent / "b.pdf")
    lines = [line("p2", "b.pdf#page=2"), line("a", "a.png"), line("p1", "b.pdf")]
    lines += [line("p3", "b.pdf#page=3"), line("again", "b.pdf#page=3"), line("text only")]
    job.write(
        lines,
        [
            answer("p1", "one", pages=[(pdf, 1)]),
            answer("p2", "two", pages=[(pdf, 2)]),
            answer("again", "three", pages=[(pdf, 3)]),
        ],
        [failure("p3", pdf, 3)],
    )
    first, second = job.records("--per", "document", "--separator", "|", code=3)
    assert first == {
        "file": str(job.path.parent / "a.png"), "status": "pending", "pages": [1], "text": "",
        "missing_pages": [1], "prompt_tokens": 0, "completion_tokens": 0, "flags": [],
    }  # fmt: skip
    assert (second["file"], second["status"], second["pages"]) == (pdf, "failed", [1, 2, 3])
    assert (second["text"], second["missing_pages"]) == ("one|two", [3])
    assert (second["prompt_tokens"], second["completion_tokens"]) == (20, 4)
    job.call("--per", "document", "-o", job.path.parent / "d.parquet", code=3)
    assert pq.read_table(job.path.parent / "d.parquet").to_pylist()[1]["text"] == "one\n\ntwo"


def test_names_of_any_bytes_are_written(job: Job) -> None:
    name = os.fsdecode(b"/\xff.png")
    job.write([line("a")], [answer("a", "A", pages=[(name, 1)])])
    for ending in ("csv", "parquet", "jsonl"):
        output = job.path.parent / f"out.{ending}"
        job.call("-o", output)
        assert output.stat().st_size > 0
    assert json.loads((job.path.parent / "out.jsonl").read_text())["file"] == name


@pytest.mark.parametrize("target", ["job.jsonl", "job.run/results.jsonl", "job.run/new.csv"])
def test_what_belongs_to_the_job_is_not_overwritten(job: Job, target: str) -> None:
    job.write([line("a")], [answer("a", "A")])
    before = (job.run / "results.jsonl").read_bytes()
    done = job.call("-o", job.path.parent / target, code=2)
    assert "belongs to the job" in done.output
    assert (job.run / "results.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "words",
    [["--format", "parquet"], ["--json"], ["--json-columns", "--per", "document", "-o", "x.csv"]],
)
def test_what_can_not_be_meant_is_a_usage_error(job: Job, words: list[str]) -> None:
    job.write([line("a")], [answer("a", "A")])
    assert "hint: " in job.call(*words, code=2).output


def test_memory_holds_places_not_answers(job: Job) -> None:
    count, text = 4000, "x" * 4000
    job.write(
        [line(f"r{number}") for number in range(count)],
        [answer(f"r{number}", text) for number in range(count)],
    )
    tracemalloc.start()
    found = open_results(job.path)
    assert sum(row.text == text for row in found.rows()) == count
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.25 * count * len(text)
