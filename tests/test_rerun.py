"""A rerun over cached pages opens no file and imports nothing heavy; whatever changed is seen."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_qwen3_vl
from click.testing import CliRunner, Result
from encoder_with_stub_tower import stub_encode
from PIL import Image

from pipeline.cli import main
from pipeline.cli.encoding import encode_and_report
from pipeline.encode import stages
from pipeline.encode.records import Resized


class Desk:
    """A directory of pages with a cache and a model; counts the runs that looked at pages."""

    def __init__(self, root: Path) -> None:
        self.root, self.looks = root, 0
        self.docs, self.cache, self.model = root / "docs", root / "cache", root / "model"

    def page(self, name: str, level: int = 7) -> Path:
        path = self.docs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), (level, 9, 9)).save(path)
        return path

    def run(self, *more: object, paths: tuple[Path, ...] = (), code: int = 0) -> dict[str, Any]:
        words = ["encode", *(paths or (self.docs,)), "--json", *more]
        words += ["--cache", self.cache, "--model", self.model]
        result: Result = CliRunner().invoke(main, list(map(str, words)))
        assert result.exit_code == code, result.output
        report: dict[str, Any] = json.loads(result.stdout)
        return report

    def counts(self, *more: object, **how: Any) -> tuple[int, int, int, int, bool]:
        """(encoded, cached, failed, skipped, whether pages were looked at) of a run."""
        before = self.looks
        report = self.run(*more, **how)
        numbers = [report[name] for name in ("encoded", "cached", "failed", "skipped")]
        return (*numbers, self.looks > before)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3_vl(tmp_path_factory.mktemp("rerun") / "model")


@pytest.fixture
def desk(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    desk = Desk(tmp_path)
    shutil.copytree(model, desk.model)
    monkeypatch.setattr(stages.TowerAtHand, "encode", stub_encode(0.0))
    monkeypatch.setattr(stages, "_resized", lambda page, target: Resized(page, page.read.rgb))

    def looking(*arguments: Any, **values: Any) -> None:
        desk.looks += 1
        encode_and_report(*arguments, **values)

    monkeypatch.setattr("pipeline.cli.encoding.encode_and_report", looking)
    monkeypatch.setattr("pipeline.memo._UNSETTLED_NS", -(10**18))  # files of a test are young
    monkeypatch.setenv("PIPELINE_MEMO", str(tmp_path / "memo.sqlite"))
    desk.page("a.png", 1)
    desk.page("below/b.png", 2)
    shutil.copy(desk.docs / "a.png", desk.docs / "again.png")
    (desk.docs / "notes.txt").write_text("no page")
    assert desk.counts() == (2, 1, 0, 1, True)
    assert desk.counts() == (0, 3, 0, 1, False)
    return desk


def test_the_cache_remembers_what_each_run_found(desk: Desk) -> None:
    desk.page("c.png", 3)
    desk.run()
    words = ["cache", "stats", "--cache", str(desk.cache)]
    runs = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)["runs"]
    names = ("command", "pages", "cached", "encoded", "failed", "hit_rate")
    assert [tuple(run[name] for name in names) for run in runs] == [
        ("encode", 4, 3, 1, 0, 0.75),
        ("encode", 3, 3, 0, 0, 1.0),  # the one that looked at no page
        ("encode", 3, 1, 2, 0, 0.3333),
    ]
    printed = CliRunner().invoke(main, words).stdout
    assert re.search(
        r"^encode [0-9: -]{16}: 3 of 4 pages cached \(75%\), 1 encoded, 0 failed$",
        printed,
        re.MULTILINE,
    )


def rewrite(path: Path) -> None:
    """Another page of the same size under the same time stamp, in place."""
    before, data = path.stat(), bytearray(path.read_bytes())
    Image.new("RGB", (64, 64), (200, 9, 9)).save(path)
    path.write_bytes(path.read_bytes().ljust(len(data), b"\0"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda desk: rewrite(desk.docs / "a.png"), (1, 2, 0, 1)),
        (lambda desk: desk.page("new.png", 3), (1, 3, 0, 1)),
        (lambda desk: desk.page("notes.txt.png", 3), (1, 3, 0, 1)),
        (lambda desk: (desk.docs / "notes.txt").write_bytes(desk.page("x.png", 3).read_bytes()),
         (1, 4, 0, 0)),
        (lambda desk: (desk.docs / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n"), (0, 3, 1, 1)),
        (lambda desk: (desk.docs / "gone.png").symlink_to("nowhere"), (0, 3, 1, 1)),
        (lambda desk: next(desk.cache.rglob("v1/[!d]*/*/*.parquet")).unlink(), (1, 2, 0, 1)),
        (lambda desk: shutil.rmtree(desk.cache), (2, 1, 0, 1)),
        (lambda desk: os.utime(desk.docs / "a.png", (1, 1)), (0, 3, 0, 1)),
    ],
    ids=["same_stamp", "new", "odd_name", "becomes_a_page", "bad", "dangling", "entry_gone",
         "cache_gone", "touched"],
)  # fmt: skip
def test_what_changed_is_looked_at(
    desk: Desk, change: Callable[[Desk], object], expected: tuple[int, ...]
) -> None:
    change(desk)
    code = 3 if expected[2] else 0
    assert desk.counts(code=code) == (*expected, True)
    if not code:
        assert desk.counts() == (0, sum(expected[:2]), 0, expected[3], False)


def test_files_that_go_and_links_that_come_need_no_look(desk: Desk) -> None:
    (desk.docs / "again.png").unlink()
    (desk.docs / "back").symlink_to(desk.docs)
    (desk.docs / ".hidden.png").write_bytes(b"no page")
    assert desk.counts() == (0, 2, 0, 1, False)
    shutil.rmtree(desk.docs / "below")
    (desk.docs / "notes.txt").unlink()
    assert desk.counts() == (0, 1, 0, 0, False)


def test_named_files_count_as_pages_of_a_directory_do(desk: Desk) -> None:
    a, b = desk.docs / "a.png", desk.docs / "below" / "b.png"
    assert desk.counts(paths=(b, a, desk.docs / "below")) == (0, 2, 0, 0, False)
    assert desk.counts(paths=(a, desk.docs / "notes.txt"), code=3) == (0, 1, 1, 0, True)


@pytest.mark.parametrize(
    "more",
    [("--max-pixels", "40000"), ("--min-pixels", "9000"), ("--pages", "1"), ("--max-failures", 1)],
)
def test_other_options_are_looked_at(desk: Desk, more: tuple[object, ...]) -> None:
    assert desk.counts(*more)[-1]


def test_another_model_or_version_is_looked_at(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    config = desk.model / "config.json"
    config.write_bytes(config.read_bytes() + b"\n")
    assert desk.counts() == (0, 3, 0, 1, True)
    monkeypatch.setattr("pipeline.rerun.program_state", lambda *libraries: "another")
    assert desk.counts() == (0, 3, 0, 1, True)
    assert desk.counts() == (0, 3, 0, 1, False)


def test_rehash_reads_every_file(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def reading(path: Path) -> tuple[str, str]:
        read.append(path.name)
        return original(path)

    from pipeline.encode import digests

    original = digests.source_digest
    monkeypatch.setattr(digests, "source_digest", reading)
    desk.page("new.png", 3)
    assert desk.counts() == (1, 3, 0, 1, True)
    assert read == ["new.png"]  # the others are remembered
    assert desk.counts("--rehash") == (0, 4, 0, 1, True)
    assert sorted(read[1:]) == ["a.png", "again.png", "b.png", "new.png"]


def test_a_file_that_changed_just_now_is_not_remembered(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.memo._UNSETTLED_NS", 10**18)
    desk.page("new.png", 3)
    assert desk.counts() == (1, 3, 0, 1, True)
    assert desk.counts() == (0, 4, 0, 1, True)


def test_without_a_memo_all_is_as_ever(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_MEMO", "")
    assert desk.counts() == (0, 3, 0, 1, True)


def test_a_run_stopped_by_failures_remembers_nothing(desk: Desk) -> None:
    Image.new("RGB", (64, 64)).save(
        desk.docs / "z.tif", save_all=True, append_images=[Image.new("RGB", (64, 65))] * 3
    )
    (desk.docs / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    desk.run("--max-failures", 0, code=4)
    (desk.docs / "bad.png").unlink()
    assert desk.counts() == (2, 5, 0, 1, True)


def test_the_tower_is_not_read_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.encode.records.tower_fingerprint", None)
    desk.page("new.png", 3)
    assert desk.counts() == (1, 3, 0, 1, True)


def test_it_says_what_any_run_says(desk: Desk) -> None:
    config = json.loads((desk.model / "preprocessor_config.json").read_text())
    del config["image_mean"]
    (desk.model / "preprocessor_config.json").write_text(json.dumps(config))
    words = ["encode", desk.docs, "--cache", desk.cache, "--model", desk.model]
    runs = [CliRunner().invoke(main, list(map(str, words))) for _ in range(3)]
    assert desk.looks == 2
    assert "image_mean" in runs[1].stderr and runs[1].stderr == runs[2].stderr
    assert runs[2].stdout.startswith("3 pages: 0 encoded, 3 cached, 0 failed; 1 file skipped; ")
    quiet = CliRunner().invoke(main, [*map(str, words), "--quiet"])
    assert (quiet.stdout, quiet.stderr) == ("", "")


def test_a_rerun_opens_no_page_and_imports_nothing_heavy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    Image.new("RGB", (64, 64)).save(docs / "a.png")
    (docs / "notes.txt").write_text("no page")
    code = (
        "import sys; opened = []\n"
        "sys.addaudithook(lambda name, about: opened.append(str(about[0])) if name == 'open'"
        " else None)\n"
        "import os; os.environ['PIPELINE_MEMO'] = sys.argv.pop()\n"
        "from pipeline import memo\nmemo._UNSETTLED_NS = -(10**18)\n"
        "from pipeline.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'pyarrow', 'tqdm', 'numpy', 'PIL', 'pypdfium2'}\n"
        f"pages = [name for name in opened if name.startswith({str(docs)!r})]\n"
        "print(sorted(heavy & set(sys.modules)), pages)"
    )
    words = [sys.executable, "-c", code, "encode", docs, "--cache", tmp_path / "cache", "--json"]
    runs = [
        subprocess.run([*words, tmp_path / "memo"], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    first, second = (run.stdout.splitlines() for run in runs)
    assert json.loads(first[0])["encoded"] == 1 and "a.png" in first[1]
    assert json.loads(second[0])["cached"] == 1 and second[1] == "[] []"
