"""`pipeline cache` as people call it: what it prints, its exit codes, what a job needs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_qwen3_vl
from click.testing import CliRunner, Result
from conftest import COMMAND
from makers_cache import OTHER_TOWER, TOWER, another_process, files_of, put, put_manifest
from PIL import Image

import pipeline.encode.reading as reading
from pipeline.cli import main
from pipeline.encode import encode_pages
from pipeline.run.images import PageOptions
from pipeline.store import Store

OLD_S = time.time() - 400 * 86_400


def cache_command(*words: object, code: int = 0) -> Result:
    """`pipeline cache WORDS`, its exit code checked."""
    result = CliRunner().invoke(main, ["cache", *map(str, words)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def record(*words: object, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cache_command(*words, "--json", code=code).stdout)
    return found


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, four pages in docs/, a job of three of them, and their cache."""
    root = tmp_path_factory.mktemp("command")
    make_qwen3_vl(root / "model")
    (root / "docs").mkdir()
    for number, name in enumerate(("a.png", "b.png", "c.png", "d.png")):
        values = np.random.default_rng(number).integers(0, 256, (64, 96, 3), dtype=np.uint8)
        Image.fromarray(values).save(root / "docs" / name)
    write_job(root / "job.jsonl", ["docs/a.png", "docs/b.png", "docs/c.png"])
    options = PageOptions(cache=root / "cache", model=str(root / "model"))
    assert encode_pages([root / "docs"], options.target()).encoded == 4
    return root


@pytest.fixture
def place(encoded: Path, tmp_path: Path) -> Path:
    """The same in a cache of its own, with an entry of another tower, all unused for long."""
    for name in ("model", "docs", "job.jsonl"):
        (tmp_path / name).symlink_to(encoded / name)
    subprocess.run(["cp", "-r", encoded / "cache", tmp_path / "cache"], check=True)
    put(tmp_path / "cache", 1)
    for path in (tmp_path / "cache").rglob("*.parquet"):
        os.utime(path, (OLD_S, OLD_S))
    return tmp_path


def write_job(path: Path, pages: list[str]) -> None:
    lines = []
    for page in pages:
        content = [{"type": "image_url", "image_url": {"url": page}}]
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        head = {"custom_id": page, "method": "POST", "url": "/v1/chat/completions"}
        lines.append(json.dumps(head | {"body": body}) + "\n")
    path.write_text("".join(lines))


def model_of(place: Path) -> tuple[str, ...]:
    return ("--cache", str(place / "cache"), "--model", str(place / "model"))


def keys_in(root: Path) -> set[str]:
    return {path.stem for path in (root / "v1").rglob("*.parquet")}


# ---------------------------------------------------------------- stats, verify, repair


def test_stats_for_people_and_machines(place: Path) -> None:
    root = place / "cache"
    found = record("stats", "--cache", root, "--max-bytes", "1")
    assert found["entries"] == 5 and len(found["towers"]) == 2
    assert found["gc"]["evicted"] == 5 and found["documents"]["files"] == 4
    printed = cache_command("stats", "--cache", root, "--max-bytes", "500GB").stdout
    assert re.match(r"5 entries, [0-9.]+ [kM]?B\n", printed)
    assert f"tower {TOWER[:12]}… (qwen3_vl): 1 entry" in printed
    assert re.search(r"^used longer ago +5 ", printed, re.MULTILINE)
    assert "gc would delete 0 of 5 entries" in printed


@pytest.mark.parametrize("command", ["stats", "verify", "repair", "gc"])
def test_a_cache_that_is_not_there_is_an_error(tmp_path: Path, command: str) -> None:
    more = ("--max-bytes", "1GB") if command == "gc" else ()
    result = cache_command(command, "--cache", tmp_path / "none", *more, code=1)
    assert result.stderr == (
        f"Error: there is no cache `{tmp_path}/none`\n\n"
        "hint: `pipeline encode PATH` makes one; check `--cache DIR`\n"
    )
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("words", [["stats"], ["verify"], ["repair"], ["gc", "--max-bytes", "1"]])
def test_formats_of_other_versions_are_named(tmp_path: Path, words: list[str]) -> None:
    put(tmp_path, 1)
    (tmp_path / "v0").mkdir()
    assert "is of an older format" in cache_command(*words, "--cache", tmp_path).stderr
    (tmp_path / "v2").mkdir()
    result = cache_command(*words, "--cache", tmp_path, code=1)
    assert "was written by a newer version" in result.stderr


def test_verify_lists_problems_and_repair_moves_them(tmp_path: Path) -> None:
    root, state = tmp_path / "cache", tmp_path / "state"
    put(root, 1)
    assert record("verify", "--cache", root)["problems"] == []
    bad = put(root, 2, OTHER_TOWER)
    bad.write_bytes(bad.read_bytes()[:-1])
    before = files_of(root)
    printed = cache_command("verify", "--cache", root, code=3).stdout
    assert printed.startswith(f"problem: {OTHER_TOWER}/{bad.parent.name}/{bad.name}: the file is")
    assert printed.endswith("; 1 problem\n")
    found = record("verify", "--cache", root, "--state", state, code=3)
    assert (found["files"], len(found["problems"])) == (2, 1)
    assert files_of(root) == before
    (done,) = record("repair", "--cache", root, "--state", state)["repaired"]
    assert done["moved_to"].startswith("quarantine/") and not bad.exists()
    assert "0 files repaired" in cache_command("repair", "--cache", root).stdout
    assert cache_command("verify", "--cache", root).stdout.endswith("; 0 problems\n")


def test_a_killed_verification_goes_on(tmp_path: Path) -> None:
    """Killed after a second of reading, thrice; the last one reads only what is left."""
    root, state = tmp_path / "cache", tmp_path / "state"
    for seed in range(30):
        path = put(root, seed)
        if seed == 0:
            first = path
    first.write_bytes(b"cut")
    slow = (
        "import time, pipeline.store.check as check, pipeline.store.logbook as logbook\n"
        "original = check.read_entry\n"
        "def slowly(*given, **named):\n    time.sleep(0.1); return original(*given, **named)\n"
        "check.read_entry = slowly; logbook._MARK_EVERY_S = 0.3\n"
        "from pipeline.cli import main\nmain()"
    )
    words = ["cache", "verify", "--cache", str(root), "--state", str(state), "--json"]
    with subprocess.Popen([COMMAND[0], "-c", slow, *words], stdout=subprocess.PIPE) as process:
        until = time.monotonic() + 60
        while not (state.exists() and b'"after": "7' in state.read_bytes()):
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.05)
        process.kill()
    marks = [json.loads(line) for line in state.read_bytes().splitlines() if b"after" in line]
    assert 0 < marks[-1]["files"] < 30
    read: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        import pipeline.store.check as check

        original = check.read_entry
        patch.setattr(
            check,
            "read_entry",
            lambda *given, **named: (read.append(given[0]), original(*given, **named))[1],
        )
        found = record("verify", "--cache", root, "--state", state, code=3)
    assert len(read) == 30 - marks[-1]["files"]
    assert (found["files"], len(found["problems"])) == (30, 1)


@pytest.mark.parametrize("words", [["repair"], ["gc", "--max-bytes", "1", "--apply"]])
def test_a_live_user_of_the_cache_is_exit_code_5(tmp_path: Path, words: list[str]) -> None:
    path = put(tmp_path, 1)
    with another_process(tmp_path) as other:
        result = cache_command(*words, "--cache", tmp_path, code=5)
        assert f"is in use by process {other.pid}" in result.stderr
    assert path.is_file()
    cache_command(*words, "--cache", tmp_path)
    assert path.is_file() is (words == ["repair"])


# ---------------------------------------------------------------- gc


def test_gc_tells_and_apply_does(place: Path) -> None:
    root = place / "cache"
    result = cache_command("gc", "--cache", root, "--max-bytes", "1")
    assert "gc would delete 5 of 5 entries" in result.stdout
    assert result.stderr == "nothing was deleted; `--apply` does it\n"
    assert len(keys_in(root)) == 5
    assert record("gc", "--cache", root, "--max-bytes", "1", "--older-than", "500d", "--apply")[
        "over_budget_bytes"
    ]
    assert len(keys_in(root)) == 5
    result = cache_command(
        "gc", "--cache", root, "--max-bytes", "1", "--older-than", "90d", "--apply"
    )
    assert "gc deleted 5 of 5 entries" in result.stdout and result.stderr == ""
    assert keys_in(root) == set()


def test_gc_never_deletes_what_a_named_job_needs(place: Path) -> None:
    root, job = place / "cache", place / "job.jsonl"
    target = PageOptions(cache=root, model=str(place / "model")).target()
    good = encode_pages([place / "docs"], target).good
    for path in root.rglob("*.parquet"):
        os.utime(path, (OLD_S, OLD_S))
    needed = {page.key for page in good if page.path.name != "d.png"}
    swept = record(
        "gc", *model_of(place), "--max-bytes", "1", "--keep", job, "--root", place, "--root",
        (place / "docs").resolve(), "--apply",
    )  # fmt: skip
    assert keys_in(root) == needed and len(needed) == 3
    assert (swept["kept"], swept["evicted"]) == (3, 2)


def keep(place: Path, job: Path, *words: object, code: int = 0) -> Result:
    before = keys_in(place / "cache")
    roots = ("--root", place, "--root", (place / "docs").resolve())
    given = ("--max-bytes", "1", "--keep", job, *roots, "--apply")
    result = cache_command("gc", *model_of(place), *given, *words, code=code)
    assert code == 0 or keys_in(place / "cache") == before
    return result


def test_gc_refuses_a_job_to_keep_that_was_made_otherwise(place: Path) -> None:
    result = keep(place, place / "job.jsonl", "--max-pixels", "2048", code=1)
    assert "no page of the job" in result.stderr and "pixel settings" in result.stderr


def test_gc_refuses_where_it_can_not_know_what_is_needed(place: Path) -> None:
    job = place / "other.jsonl"
    write_job(job, ["docs/a.png", "docs/gone.png"])
    result = keep(place, job, code=1)
    assert "can't be read, so what they need is not known" in result.stderr
    assert "can't read job file" in keep(place, place / "none.jsonl", code=1).stderr


def test_gc_says_which_pages_to_keep_it_does_not_have(place: Path) -> None:
    target = PageOptions(cache=place / "cache", model=str(place / "model")).target()
    (good, *_) = encode_pages([place / "docs" / "a.png"], target).good
    target.store.path(good.key).unlink()
    result = keep(place, place / "job.jsonl")
    assert "warning: 1 page of the jobs to keep not in the cache" in result.stderr
    assert len(keys_in(place / "cache")) == 2


# ---------------------------------------------------------------- export, import


def test_a_job_is_carried_and_the_rerun_there_decodes_nothing(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, there = tmp_path / "out" / "carry.tar", tmp_path / "there"
    roots = ("--root", place, "--root", (place / "docs").resolve())
    out = record("export", archive, *model_of(place), "--job", place / "job.jsonl", *roots)
    assert (out["entries"], out["manifests"], out["missing"]) == (3, 3, [])
    got = record("import", archive, "--cache", there)
    assert (got["entries"], got["manifests"]) == (3, 3)
    assert record("verify", "--cache", there)["problems"] == []

    def decoded(*given: object) -> str:
        raise AssertionError("a page was decoded")

    monkeypatch.setattr(reading, "pixel_digest", decoded)
    target = PageOptions(cache=there, model=str(place / "model")).target()
    names = [place / "docs" / name for name in ("a.png", "b.png", "c.png")]
    report = encode_pages(names, target)
    assert (report.encoded, report.cached) == (0, 3)


def test_the_whole_cache_is_carried_byte_for_byte(place: Path, tmp_path: Path) -> None:
    root, archive = place / "cache", tmp_path / "carry.tar"
    printed = cache_command("export", archive, "--cache", root).stdout
    assert printed.startswith("5 entries, ") and printed.endswith(
        "4 documents; 0 there before, 0 left out\n"
    )
    cache_command("import", archive, "--cache", tmp_path / "there")
    assert files_of(tmp_path / "there") == files_of(root)
    again = cache_command("import", archive, "--cache", tmp_path / "there").stdout
    assert "0 entries, 0 B, and 0 documents; 9 there before" in again


def test_a_page_that_is_not_there_is_named(place: Path, tmp_path: Path) -> None:
    target = PageOptions(cache=place / "cache", model=str(place / "model")).target()
    (good, *_) = encode_pages([place / "docs" / "a.png"], target).good
    target.store.path(good.key).unlink()
    roots = ("--root", place, "--root", (place / "docs").resolve())
    words = ("export", tmp_path / "c.tar", *model_of(place), "--job", place / "job.jsonl", *roots)
    result = cache_command(*words, code=3)
    assert "not in the cache: " in result.stderr and "a.png" in result.stderr


def test_what_is_bad_is_named_and_exit_code_3(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    put(root, 1)
    bad = put(root, 2)
    bad.write_bytes(b"cut")
    put_manifest(root)
    result = cache_command("export", tmp_path / "a.tar", "--cache", root, code=3)
    assert f"left out: {TOWER}/{bad.parent.name}/{bad.name}: the file is damaged" in result.stderr
    result = cache_command("export", tmp_path / "a.tar", "--cache", root, code=2)
    assert "is there already" in result.stderr
    result = cache_command(
        "export", tmp_path / "b.tar", "--job", "x", "--tower", "7", "--cache", root, code=2
    )
    assert "exclude each other" in result.stderr


# ---------------------------------------------------------------- path


def test_path_shows_where_and_why(place: Path) -> None:
    page = place / "docs" / "a.png"
    target = PageOptions(cache=place / "cache", model=str(place / "model")).target()
    (good, *_) = encode_pages([page], target).good
    found = record("path", page, *model_of(place))
    assert (found["key"], found["state"]) == (good.key, "cached")
    assert found["path"] == str(target.store.path(good.key))
    assert found["tower"] == target.store.tower_fingerprint
    assert found["manifest_there"] and Path(found["manifest"]).is_file()
    assert found["spec"]["family"] == "qwen3_vl"
    printed = cache_command("path", f"{page}#page=1", *model_of(place)).stdout
    for text in (good.key, found["pixels"], "96 x 64 px", "cached, ", "spec geometry"):
        assert text in printed


def test_path_decodes_where_nothing_is_known_and_changes_nothing(
    place: Path, tmp_path: Path
) -> None:
    page = place / "docs" / "a.png"
    known = record("path", page, *model_of(place))
    words = ("--cache", tmp_path / "none", "--model", place / "model")
    found = record("path", page, *words)
    assert (found["key"], found["state"], found["bytes"]) == (known["key"], "missing", None)
    assert not found["manifest_there"] and not (tmp_path / "none").exists()


def test_path_says_what_is_wrong_with_an_entry(place: Path) -> None:
    page = place / "docs" / "a.png"
    entry = Path(record("path", page, *model_of(place))["path"])
    entry.write_bytes(b"cut")
    found = record("path", page, *model_of(place))
    assert found["state"] == "bad" and "the file is damaged" in found["why"]
    assert entry.is_file()


def test_path_of_what_is_no_page(place: Path) -> None:
    for name in ("docs/none.png", "docs/a.png#page=7"):
        result = cache_command("path", place / name, *model_of(place), code=3)
        assert result.stderr.endswith("\n") and "failed: " in result.stderr
    assert "no page file" in cache_command("path", place / "docs", *model_of(place), code=2).stderr


def test_path_of_a_page_in_an_archive_is_that_of_the_file(place: Path) -> None:
    page = place / "docs" / "a.png"
    with zipfile.ZipFile(place / "scans.zip", "w") as archive:
        archive.write(page, "2024/a.png")
    inside = record("path", place / "scans.zip" / "2024" / "a.png", *model_of(place))
    outside = record("path", page, *model_of(place))
    assert inside["file"] != outside["file"]
    assert {**inside, "file": ""} == {**outside, "file": ""}
    result = cache_command("path", place / "scans.zip", *model_of(place), code=2)
    assert "no page file" in result.stderr


def test_a_file_whose_name_looks_like_a_page_is_a_file(place: Path) -> None:
    name = place / "x.png#page=3"
    name.write_bytes((place / "docs" / "a.png").read_bytes())
    assert record("path", name, *model_of(place))["page"] == 1


# ---------------------------------------------------------------- sizes, ages, help


@pytest.mark.parametrize("text", ["0", "GB", "-1", "1.5GB", "1 XB", ""])
def test_what_is_no_size_is_refused(tmp_path: Path, text: str) -> None:
    put(tmp_path, 1)
    result = cache_command("gc", "--cache", tmp_path, "--max-bytes", text, code=2)
    assert "is no size" in result.stderr


@pytest.mark.parametrize("text", ["90", "d", "-1d", "1y"])
def test_what_is_no_age_is_refused(tmp_path: Path, text: str) -> None:
    put(tmp_path, 1)
    words = ("--max-bytes", "1", "--older-than", text)
    assert "is no age" in cache_command("gc", "--cache", tmp_path, *words, code=2).stderr


@pytest.mark.parametrize("command", ["stats", "verify", "repair", "gc", "export", "import", "path"])
def test_every_help_has_an_example(command: str) -> None:
    assert f"Example:\n    pipeline cache {command}" in cache_command(command, "--help").stdout


def test_counting_and_checking_import_neither_torch_nor_transformers(tmp_path: Path) -> None:
    put(tmp_path, 1)
    code = (
        "import sys; from pipeline.cli import main\n"
        "try: main(['cache', sys.argv[1], '--cache', sys.argv[2]])\n"
        "except SystemExit as done: assert not done.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    for command in ("stats", "verify"):
        subprocess.run([COMMAND[0], "-c", code, command, tmp_path], check=True)


def test_the_store_of_this_module_is_clean(encoded: Path) -> None:
    assert Store(encoded / "cache", TOWER).verify() == []
