"""What is named on the command line: patterns, lists of files, and names of any bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from PIL import Image

import pipeline.encode.digests as digests
from pipeline.cli import main
from pipeline.errors import ExitCode, Failure, Reason
from pipeline.jobs import JobImage, JobLine, read_job, write_job
from pipeline.pages import discover
from pipeline.pages.inputs import expand, gather_inputs, names_in
from pipeline.run.images import PageOptions, open_pages
from pipeline.run.survey import JobSource, survey_job

# bytes that mean something to a shell, a url, a job line or a terminal
NAMES = [
    b"two words.png",
    b"line\nbreak.png",
    b"tab\tand\r.png",
    b"a#page=2.png",
    b"100%.png",
    b"%41.png",
    b"what?x=1&y.png",
    b"semi;colon:c.png",
    b"[1] *.png",
    b'"quoted" back\\slash.png',
    "Rechnung für 2 €.png".encode(),
    "Rechnung fu\u0308r.png".encode(),
    "日本語.png".encode(),
    b"latin1 \xe9\xff.png",
    b"-n.png",
    b"~.png",
    b" .png",
]


def page(path: Path, level: int = 255) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (64, 64), level).save(path, format="PNG")
    return path


def tree(root: Path, *names: str) -> None:
    for name in names:
        page(root / name)


def run(*words: object, data: bytes = b"") -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], input=data)


def listed(*words: object, data: bytes = b"") -> dict[str, str | None]:
    """What `pipeline pages` says: file → reason."""
    result = run("pages", *words, "--json", data=data)
    assert result.exit_code in (ExitCode.OK, ExitCode.SOME_FAILED), result.stderr
    return {each["file"]: each["reason"] for each in json.loads(result.stdout)["pages"]}


# ---------------------------------------------------------------- lists

LISTS = [
    (b"a.png\nb c.png\n", ["a.png", "b c.png"]),
    (b"a.png\nb.png", ["a.png", "b.png"]),
    (b"\n a.png\n\n  \nb.png \n", [" a.png", "b.png "]),
    (b"\xef\xbb\xbfa.png\r\n\r\nb.png\r\n", ["a.png", "b.png"]),
    (b"a\r\nb\n", ["a\r", "b"]),
    (b"a\nb.png\0\xef\xbb\xbfc.png\0\0 \0", ["a\nb.png", "\ufeffc.png", " "]),
    (b"a.png\0b.png", ["a.png", "b.png"]),
    (b"\xff.png\n", ["\udcff.png"]),
    (b"", []),
    (b"\n\n", []),
]


@pytest.mark.parametrize(("data", "names"), LISTS, ids=range(len(LISTS)))
def test_a_list_is_separated_by_nul_if_it_holds_one_else_by_line(
    data: bytes, names: list[str]
) -> None:
    assert [str(name) for name in names_in(data)] == names


@pytest.mark.parametrize("separator", [b"\0", b"\n"], ids=["nul", "newline"])
@pytest.mark.parametrize("stdin", [True, False], ids=["stdin", "file"])
def test_pages_of_a_list_are_found_by_names_of_any_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: bytes, stdin: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [name for name in NAMES if separator not in name]
    for name in names:
        page(Path(os.fsdecode(name)))
    data = separator.join(names)
    Path("list").write_bytes(data)
    found = listed("--files-from", "-" if stdin else "list", data=data if stdin else b"")
    assert found == {os.fsdecode(name): None for name in names}


def test_a_listed_name_is_no_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`a[1].png` that has gone must not become `a1.png`."""
    monkeypatch.chdir(tmp_path)
    tree(tmp_path, "a1.png")
    assert listed("--files-from", "-", data=b"a[1].png\n*.png") == {
        "a[1].png": "not_found",
        "*.png": "not_found",
    }


def test_paths_and_a_list_go_together_and_each_file_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tree(tmp_path, "b.png", "d/a.png", "d/c.png")
    assert list(listed("b.png", "--files-from", "-", data=b"d\nb.png\n./d/a.png\n")) == [
        "b.png",
        "d/a.png",
        "d/c.png",
    ]


@pytest.mark.parametrize("command", ["encode", "pages"])
def test_nothing_named_and_a_list_that_is_not_there_are_usage_errors(
    tmp_path: Path, command: str
) -> None:
    nothing = run(command)
    assert (nothing.exit_code, nothing.stderr) == (
        2,
        "Error: nothing to read\n\nhint: name a file or a directory, or give `--files-from`\n",
    )
    missing = run(command, "--files-from", tmp_path / "none")
    assert (missing.exit_code, missing.stderr) == (
        2,
        f"Error: can't read the list `{tmp_path / 'none'}`: No such file or directory\n\n"
        "hint: name a file of paths, or - for standard input\n",
    )
    assert run(command, "--files-from", tmp_path).exit_code == 2


def test_an_empty_list_is_no_error() -> None:
    assert listed("--files-from", "-") == {}


# ---------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.png", ["p1.png", "p2.png", "p10.png"]),
        ("p?.png", ["p1.png", "p2.png"]),
        ("p[12]*.png", ["p1.png", "p2.png", "p10.png"]),
        ("p[!1].png", ["p2.png"]),
        ("*/p1.png", ["d2/p1.png", "d10/p1.png"]),
        ("**/p1.png", ["d2/e/p1.png", "d2/p1.png", "d10/p1.png", "p1.png"]),
        ("d*/**", ["d2", "d10"]),
        ("d2/**/*.png", ["d2/e/p1.png", "d2/p1.png"]),
        ("d2**/p1.png", ["d2/p1.png"]),
        (".*.png", [".p3.png"]),
        ("*.tif", ["*.tif"]),
        ("p[1.png", ["p[1.png"]),
        ("none/**", ["none/**"]),
        ("p1.png", ["p1.png"]),
        ("none.png", ["none.png"]),
    ],
)
def test_a_pattern_is_expanded_in_natural_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, names: list[str]
) -> None:
    tree(tmp_path, "p10.png", "p2.png", "p1.png", "d10/p1.png", "d2/p1.png", "d2/e/p1.png")
    tree(tmp_path, ".p3.png", ".git/p1.png")
    monkeypatch.chdir(tmp_path)
    assert [str(found) for found in expand(Path(pattern))] == names
    monkeypatch.chdir("/")
    absolute = [str(found) for found in expand(tmp_path / pattern)]
    assert absolute == [str(tmp_path / name) for name in names]


def test_a_file_with_the_name_of_a_pattern_wins(tmp_path: Path) -> None:
    tree(tmp_path, "a[1].png", "a1.png")
    assert expand(tmp_path / "a[1].png") == [tmp_path / "a[1].png"]


def test_a_pattern_without_a_match_is_a_failure_that_names_it(tmp_path: Path) -> None:
    (failure,) = discover(gather_inputs([tmp_path / "*.tif"], []).paths).failures
    assert (failure.file, failure.reason) == (str(tmp_path / "*.tif"), Reason.NOT_FOUND)
    assert listed(tmp_path / "*.tif") == {str(tmp_path / "*.tif"): "not_found"}


def test_loops_of_links_end_a_deep_pattern(tmp_path: Path) -> None:
    tree(tmp_path, "a/b/page.png")
    for name in ("up", "up2", "up3"):
        (tmp_path / "a" / "b" / name).symlink_to(tmp_path / "a")
    assert expand(tmp_path / "**" / "*.png") == [tmp_path / "a" / "b" / "page.png"]


@pytest.mark.parametrize("name", ["*" + "a" * 300, "a" * 300 + "/*", "[" * 2000])
def test_a_pattern_that_is_too_long_is_no_crash(name: str) -> None:
    assert expand(Path(name)) == [Path(name)]


# ---------------------------------------------------------------- names in jobs


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_name_of_any_bytes_survives_the_job_file(tmp_path: Path, name: bytes) -> None:
    """From the page through the url in the job to the path that a run opens."""
    path = page(tmp_path / os.fsdecode(name))
    job = tmp_path / "jobs" / "night.jsonl"
    images = [JobImage(path, 1, False), JobImage(path, 3, True)]
    write_job(job, images, inputs=[tmp_path], prompt="p", max_tokens=1, model_name="m")
    job.read_bytes().decode("utf-8")
    lines = list(read_job(job, roots=[tmp_path], attachments=tmp_path))
    assert all(isinstance(line, JobLine) for line in lines), lines
    found = [(image.path, image.page) for line in lines for image in line.images]  # type: ignore[union-attr]
    assert found == [(path, 1), (path, 3)]
    assert len({line.custom_id for line in lines}) == 2


def test_a_job_of_any_names_is_written_and_each_page_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command writes the job; a run's own reading of it finds every page in the cache."""
    monkeypatch.chdir(tmp_path)
    for level, name in enumerate(NAMES):
        page(Path("docs") / os.fsdecode(name), level)
    data = b"\0".join(b"docs/" + name for name in NAMES)
    words = ["encode", "--files-from", "-", "--cache", "cache", "--json"]
    result = run(*words, "--job", "jobs/night.jsonl", "--prompt", "Read.", data=data)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["encoded"] == len(NAMES)
    survey = survey_job(JobSource.of(Path("jobs/night.jsonl"), None, (), tmp_path / "attachments"))
    assert (survey.requests, survey.failures) == (len(NAMES), ())
    names = [os.fsencode(image.path.name) for image in survey.images]
    assert names == NAMES
    locator = open_pages(PageOptions(cache=Path("cache"))).locator
    found = [locator.locate(image.path, image.page) for image in survey.images]
    assert [None for page in found if page is None or isinstance(page, Failure)] == []


def test_listed_pages_are_named_in_the_job_as_they_were_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of many directories are often named alike; their paths tell them apart."""
    monkeypatch.chdir(tmp_path)
    tree(tmp_path, "a/page1.png", "b/page1.png")
    words = ["--cache", "cache", "--job", "night.jsonl", "--prompt", "Read."]
    for inputs, data in ((["*/page1.png"], b""), (["--files-from", "-"], b"a/page1.png\nb\n")):
        result = run("encode", *inputs, *words, data=data)
        assert result.exit_code == 0, result.stderr
        lines = Path("night.jsonl").read_text().splitlines()
        assert [json.loads(line)["custom_id"] for line in lines] == ["a/page1.png", "b/page1.png"]


# ---------------------------------------------------------------- files that do not stay


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (Path.unlink, "No such file or directory"),
        (lambda path: path.write_bytes(b"another"), "the file changed while it was read"),
    ],
    ids=["vanishes", "changes"],
)
def test_a_file_that_does_not_stay_while_it_is_read_costs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], detail: str
) -> None:
    def changing(path: Path) -> tuple[str, str]:
        found = original(path)
        if path.name == "a.png":
            change(path)
        return found

    original = digests.source_digest
    monkeypatch.setattr(digests, "source_digest", changing)
    monkeypatch.chdir(tmp_path)
    page(Path("docs/a.png"), 1)
    page(Path("docs/b.png"), 2)
    result = run(
        "encode", "docs", "--cache", "cache", "--json", "--job", "j.jsonl", "--prompt", "p"
    )
    report = json.loads(result.stdout)
    assert result.exit_code == ExitCode.SOME_FAILED
    assert {failure["file"] for failure in report["failures"]} == {"docs/a.png"}
    assert detail in [failure["detail"] for failure in report["failures"]]
    assert report["encoded"] == 1
    (line,) = Path("j.jsonl").read_text().splitlines()
    assert json.loads(line)["custom_id"] == "b.png"


def test_a_file_that_vanishes_before_its_turn_costs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanishing(path: Path) -> tuple[str, str]:
        path.with_name("b.png").unlink(missing_ok=True)
        return original(path)

    original = digests.source_digest
    monkeypatch.setattr(digests, "source_digest", vanishing)
    for level, name in enumerate(("a.png", "b.png", "c.png")):
        page(tmp_path / "docs" / name, level)
    result = run("encode", tmp_path / "docs", "--cache", tmp_path / "cache", "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["encoded"], report["failed"]) == (ExitCode.SOME_FAILED, 2, 1)
    (failure,) = report["failures"]
    assert failure["file"] == str(tmp_path / "docs" / "b.png")
    assert failure["detail"] == "No such file or directory" and failure["retryable"]
