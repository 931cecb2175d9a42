"""Job files: what people write, what is refused and how it is named."""

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import Failure, JobError, Reason
from pipeline.jobs import (
    ImageReference,
    JobImage,
    JobLine,
    cache_part,
    check_job_path,
    read_job,
    with_embeddings,
    write_job,
)
from pipeline.run.survey import JobSource


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a b.png").write_bytes(b"pixels")
    (tmp_path / "jobs").mkdir()
    return tmp_path / "jobs" / "night.jsonl"


def line(custom_id: object = "a", **changes: object) -> dict:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions"} | {
        "body": body,
        **changes,
    }


def image_line(url: object, custom_id: str = "a") -> dict:
    part = {"type": "image_url", "image_url": {"url": url}}
    return line(custom_id, body={"messages": [{"role": "user", "content": [part]}]})


def read(job: Path, *records: object) -> list[JobLine | Failure]:
    lines = (text if isinstance(text, str) else json.dumps(text) for text in records)
    job.write_text("\n".join(lines))
    return list(read_job(job, roots=[job.parent.parent], attachments=job.parent / "attached"))


BAD_LINES = [
    ("{", Reason.BAD_LINE, "not valid JSON"),
    ("[1]", Reason.BAD_LINE, "expected a JSON object, found list"),
    ("5", Reason.BAD_LINE, "expected a JSON object, found int"),
    (line(custom_id=1), Reason.BAD_FIELD, "custom_id must be a non-empty string, found 1"),
    (line(custom_id=""), Reason.BAD_FIELD, "custom_id must be a non-empty string, found ''"),
    (line(method="GET"), Reason.BAD_FIELD, "method must be POST, found 'GET'"),
    (line(url="/v1/foo"), Reason.BAD_FIELD, "url must be /v1/chat/completions, found '/v1/foo'"),
    (line(body=[]), Reason.BAD_FIELD, "body must be a JSON object"),
    (line(body={"messages": []}), Reason.BAD_FIELD, "body.messages must be a non-empty list"),
    (
        line(body={"messages": [{"content": "x"}], "stream": True}),
        Reason.BAD_FIELD,
        "stream must be false in a batch",
    ),
    (image_line(None), Reason.BAD_IMAGE, "image_url.url must be a non-empty string"),
    (image_line("https://x.org/a.png"), Reason.BAD_IMAGE, "images are not fetched"),
    (image_line("s3://x/a.png"), Reason.BAD_IMAGE, "unsupported image url scheme 's3'"),
    (image_line("../docs/a%20b.png#page=0"), Reason.BAD_IMAGE, "#page=N with N from 1"),
    (image_line("../docs/a%20b.png#p=1"), Reason.BAD_IMAGE, "#page=N with N from 1"),
    (image_line("../docs/none.png"), Reason.NOT_FOUND, "no such file"),
    (image_line("../../etc/passwd"), Reason.OUTSIDE_ROOT, "allow it with --root"),
    (image_line("data:image/png;base64,%%%"), Reason.BAD_IMAGE, "not valid base64"),
    ('{"custom_id": "a", "temperature": NaN}', Reason.BAD_LINE, "not JSON compliant"),
    ('{"custom_id": "a", "temperature": 1e999}', Reason.BAD_LINE, "not JSON compliant"),
    (line(custom_id="\ud800"), Reason.BAD_LINE, "surrogates not allowed"),
    (line(body=json.loads("[" * 100 + "]" * 100)), Reason.BAD_LINE, "more than 100 levels deep"),
    ("[" * 100_000, Reason.BAD_LINE, "not valid JSON"),
    (image_line("http://[::1"), Reason.BAD_IMAGE, "Invalid IPv6 URL"),
    (image_line("//[a].png"), Reason.BAD_IMAGE, "//[a].png: "),
    (image_line("a" * 300 + ".png"), Reason.NOT_FOUND, "no such file"),
    (image_line("../docs/a%20b.png#page=" + "9" * 5000), Reason.BAD_IMAGE, "#page=N with N from 1"),
    (image_line("data:text/plain,hi"), Reason.BAD_IMAGE, "must be base64"),
]


@pytest.mark.parametrize(("bad", "reason", "text"), BAD_LINES, ids=[b[2][:40] for b in BAD_LINES])
def test_a_bad_line_is_named_by_file_and_line_and_costs_nothing_else(
    job: Path, bad: object, reason: Reason, text: str
) -> None:
    before, failure, after = read(job, line("before"), bad, line("after"))
    assert isinstance(before, JobLine) and isinstance(after, JobLine)
    assert isinstance(failure, Failure)
    assert failure.reason is reason
    assert failure.detail.startswith(f"{job}:2: ")
    assert text in failure.detail


def test_a_custom_id_used_twice_refuses_the_job_with_both_lines(job: Path) -> None:
    with pytest.raises(JobError, match=r"night.jsonl:3: custom_id 'a' was already used on line 1"):
        read(job, line("a"), line("b"), line("a"))


def test_byte_order_mark_crlf_blank_lines_and_no_last_newline_are_tolerated(job: Path) -> None:
    job.write_bytes(
        b"\xef\xbb\xbf"
        + json.dumps(line("a")).encode()
        + b"\r\n\r\n"
        + json.dumps(line("b")).encode()
    )
    found = list(read_job(job, attachments=job.parent))
    assert [(each.custom_id, each.line_number) for each in found] == [("a", 1), ("b", 3)]


def test_images_keep_their_order_over_messages(job: Path) -> None:
    data = base64.b64encode(b"png bytes").decode()
    parts = [
        {"type": "text", "text": "<|image_pad|>"},
        {"type": "image_url", "image_url": {"url": "../docs/a%20b.png#page=2"}},
    ]
    more = [{"type": "image_url", "image_url": f"data:image/png;base64,{data}"}]
    body = {"messages": [{"role": "user", "content": parts}, {"role": "user", "content": more}]}
    (found,) = read(job, line(body=body))
    assert isinstance(found, JobLine)
    page = job.parent.parent / "docs" / "a b.png"
    assert found.images[0] == ImageReference(page, 2)
    assert found.images[1].data == b"png bytes"

    rewritten = with_embeddings(
        found, [cache_part("k1", image_grid_thw=[1, 4, 6]), cache_part("k2")], "served"
    )
    first, second = rewritten["messages"]
    assert first["content"][0] == parts[0]
    assert first["content"][1]["image_embeds"] == {
        "image_embeds": "cache:k1",
        "image_grid_thw": [1, 4, 6],
    }
    assert second["content"][0]["image_embeds"] == "cache:k2"
    assert rewritten["model"] == "served"
    assert found.body["messages"][0]["content"][1] == parts[1], "the line itself is left alone"


def test_a_missing_job_file_names_the_command_that_writes_one(tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        list(read_job(tmp_path / "no.jsonl", attachments=tmp_path))
    assert "can't read job file" in caught.value.message
    assert "pipeline encode" in caught.value.hint


def test_what_is_written_is_read_back(job: Path) -> None:
    docs = job.parent.parent / "docs"
    (docs / "z.pdf").write_bytes(b"%PDF")
    images = [
        JobImage(docs / "a b.png", 1, False),
        JobImage(docs / "z.pdf", 1, True),
        JobImage(docs / "z.pdf", 2, True),
        JobImage(docs / "z.pdf", 3, True),
    ]
    count = write_job(
        job,
        images,
        inputs=[docs],
        prompt="Read.",
        max_tokens=7,
        model_name="m",
        pages_per_request=2,
    )
    lines = list(read_job(job, roots=[docs], attachments=job.parent))
    assert count == 3
    assert all(isinstance(each, JobLine) for each in lines)
    assert [each.custom_id for each in lines] == [
        "a%20b.png",
        "z.pdf#page=1-2",
        "z.pdf#page=3",
    ]
    assert [len(each.images) for each in lines] == [1, 2, 1]
    content = lines[0].body["messages"][0]["content"]
    assert content[0] == {"type": "text", "text": "Read."}, "the shared text goes first"
    assert content[1]["image_url"]["url"] == "../docs/a%20b.png"


def test_several_inputs_put_their_name_in_front(job: Path) -> None:
    other = job.parent.parent / "scans"
    other.mkdir()
    (other / "a b.png").write_bytes(b"x")
    docs = job.parent.parent / "docs"
    images = [JobImage(docs / "a b.png", 1, False), JobImage(other / "a b.png", 1, False)]
    write_job(job, images, inputs=[docs, other], prompt="p", max_tokens=1, model_name="m")
    found = list(read_job(job, roots=[docs.parent], attachments=job.parent))
    assert [each.custom_id for each in found] == ["docs/a%20b.png", "scans/a%20b.png"]


def test_a_bad_line_takes_its_custom_id_as_a_good_one_does(job: Path) -> None:
    with pytest.raises(JobError, match=r"night\.jsonl:2: custom_id 'a' was already used on line 1"):
        read(job, line("a", method="GET"), line("a"))


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["directory", "fifo"])
def test_a_job_that_is_no_regular_file_is_refused(job: Path, make: Callable[[Path], None]) -> None:
    make(job)
    with pytest.raises(JobError, match="is no regular file"):
        list(read_job(job, attachments=job.parent))


OTHER_FILES = [b"\x89PNG\r\n\x1a\n pixels", b"Read the page.", b'{"type": "object"}', b"[1]\n"]


@pytest.mark.parametrize("content", OTHER_FILES)
def test_only_a_job_is_replaced_by_a_job(job: Path, content: bytes) -> None:
    job.write_bytes(content)
    with pytest.raises(JobError, match="is there already and is no job file"):
        check_job_path(job)
    assert job.read_bytes() == content


@pytest.mark.parametrize("content", [None, b"", json.dumps(line()).encode()])
def test_a_job_may_be_new_or_replace_one(job: Path, content: bytes | None) -> None:
    if content is not None:
        job.write_bytes(content)
    check_job_path(job)
    assert [path.name for path in job.parent.iterdir()] == ([] if content is None else [job.name])


def test_a_job_that_can_not_be_written_is_an_error_at_once(job: Path) -> None:
    with pytest.raises(JobError, match="can't write"):
        check_job_path(job / ("a" * 300))
    assert list(job.iterdir()) == []


def test_a_job_that_fails_half_way_leaves_the_old_one_and_nothing_else(job: Path) -> None:
    job.write_bytes(b"old")
    image = JobImage(job.parent.parent / "docs" / "a b.png", 1, False)
    with pytest.raises(JobError, match="two inputs give the custom_id"):
        write_job(
            job, [image, image], inputs=[image.path], prompt="p", max_tokens=1, model_name="m"
        )
    assert [path.name for path in job.parent.iterdir()] == [job.name]
    assert job.read_bytes() == b"old"


@pytest.mark.parametrize(
    ("here", "allowed"),
    [("project", ["project/jobs", "project"]), ("project/docs", ["project/jobs"])],
)
def test_images_stay_below_the_job_or_the_project_that_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, allowed: list[str]
) -> None:
    for name in ("project/jobs", "project/docs"):
        (tmp_path / name).mkdir(parents=True)
    job = tmp_path / "project/jobs/night.jsonl"
    monkeypatch.chdir(tmp_path / here)
    source = JobSource.of(job, None, (), tmp_path)
    assert list(source.roots) == [tmp_path / name for name in allowed]


def test_the_whole_file_system_is_no_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    assert JobSource.of(tmp_path / "night.jsonl", None, (), tmp_path).roots == (tmp_path,)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert JobSource.of(tmp_path / "x" / "n.jsonl", None, (), tmp_path).roots == (tmp_path / "x",)
