"""Claims: encoders at once over the same pages split them, and one that dies leaves none behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_qwen3_vl
from encoder_with_stub_tower import stub_encode
from PIL import Image

from pipeline.checkpoint import resolve_model
from pipeline.encode import EncodeReport, Target, encode_pages, stages, target_for
from pipeline.encode.records import Encoded, Resized
from pipeline.store.claims import Claims, claims_in
from pipeline.store.location import Remote

ENCODER = Path(__file__).with_name("encoder_with_stub_tower.py")
KEY = "ab" * 32


# ---------------------------------------------------------------- single claims


def in_another_process(path: Path, *calls: str) -> list[Any]:
    """What the methods of claims give there, each called with KEY."""
    code = (
        "import sys; from pathlib import Path; from pipeline.store.claims import Claims\n"
        "with Claims(Path(sys.argv[1])) as claims:\n"
        "    print([getattr(claims, name)(sys.argv[2]) for name in sys.argv[3:]])"
    )
    words = [sys.executable, "-c", code, path, KEY, *calls]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: list[Any] = json.loads(
        done.stdout.replace("True", "true").replace("False", "false").replace("None", "null")
    )
    return found


def test_a_claim_is_one_processes_until_it_drops_it(tmp_path: Path) -> None:
    path = tmp_path / "below" / "claims"
    with Claims(path) as claims:
        assert claims.is_free(KEY) and claims.take(KEY) and claims.take(KEY)
        assert claims.is_free(KEY)  # for us
        assert in_another_process(path, "is_free", "take") == [False, False]
        assert claims.take("another")
        claims.drop("another")
        assert in_another_process(path, "is_free") == [False]
        claims.drop(KEY)
        assert in_another_process(path, "is_free", "take") == [True, True]
        assert claims.take(KEY)  # the other one has ended
    assert in_another_process(path, "take") == [True]
    assert path.stat().st_size == 0


def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from pipeline.store.claims import Claims\n"
        "with Claims(Path(sys.argv[1])) as claims:\n"
        "    claims.take(sys.argv[2]); print('taken', flush=True); time.sleep(600)"
    )
    words = [sys.executable, "-c", code, tmp_path / "claims", KEY]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE) as holder,
        Claims(tmp_path / "claims") as claims,
    ):
        assert holder.stdout is not None and holder.stdout.readline()
        assert not claims.take(KEY)
        holder.kill()
        holder.wait()
        assert claims.take(KEY)


def test_two_in_one_process_are_two(tmp_path: Path) -> None:
    with Claims(tmp_path / "claims") as one, Claims(tmp_path / "claims") as two:
        assert one.take(KEY) and not two.take(KEY)
        one.drop(KEY)
        assert two.take(KEY)


def test_without_locks_everything_is_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for claims in (claims_in(Remote("s3://bucket/prefix")), Claims(tmp_path / "file" / "claims")):
        with claims:
            assert claims.take(KEY) and claims.is_free(KEY)
            claims.drop(KEY)

    def refused(*_: object) -> bytes:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("pipeline.store.claims.fcntl.fcntl", refused)
    with Claims(tmp_path / "claims") as claims:
        assert claims.take(KEY) and claims.is_free(KEY)


# ---------------------------------------------------------------- encoders


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3_vl(tmp_path_factory.mktemp("claims") / "model")


@pytest.fixture
def target(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setattr(stages.TowerAtHand, "encode", stub_encode(0.0))
    monkeypatch.setattr(stages, "_resized", lambda page, target: Resized(page, page.read.rgb))
    return target_for(resolve_model(str(checkpoint)), tmp_path / "cache")


def make_pages(directory: Path, count: int) -> Path:
    directory.mkdir()
    for number in range(count):
        Image.new("RGB", (64, 64), (number, 9, 9)).save(directory / f"{number:03}.png")
    return directory


def make_document(path: Path, count: int) -> Path:
    sheets = [Image.new("RGB", (64, 64), (number, 9, 9)) for number in range(count)]
    sheets[0].save(path, save_all=True, append_images=sheets[1:])
    return path


def start(paths: list[Path], cache: Path, log: Path, tower_s: float) -> subprocess.Popen[str]:
    words = [sys.executable, str(ENCODER), str(tower_s), str(log), "encode", *map(str, paths)]
    words += ["--cache", str(cache), "--threads", "1", "--json"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("kind", ["files", "document"])
def test_encoders_at_once_encode_every_page_once(tmp_path: Path, kind: str) -> None:
    pages = 60
    if kind == "files":
        paths = [make_pages(tmp_path / "docs", pages)]
    else:
        paths = [make_document(tmp_path / "a.tif", pages)]
    log = tmp_path / "log"
    running = [start(paths, tmp_path / "cache", log, 0.02) for _ in range(4)]
    reports = []
    for process in running:
        stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
        reports.append(json.loads(stdout))
    assert Counter(report["pages"] for report in reports) == {pages: 4}
    assert sum(report["encoded"] for report in reports) == pages
    assert sorted(Counter(log.read_text().split()).values()) == [1] * pages
    assert sum(report["encoded"] > 0 for report in reports) > 1  # they did split it
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "cache", "verify", "--cache", tmp_path / "cache"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_what_a_killed_encoder_had_claimed_is_encoded_by_the_other(tmp_path: Path) -> None:
    docs, log = make_pages(tmp_path / "docs", 12), tmp_path / "log"
    stuck = start([docs], tmp_path / "cache", tmp_path / "other", 3600)
    while not (tmp_path / "cache" / "claims").exists():
        time.sleep(0.05)
    time.sleep(2)  # it has claimed its first pages
    other = start([docs], tmp_path / "cache", log, 0.0)
    deadline = time.monotonic() + 60
    while not log.exists() or len(log.read_text().split()) < 6:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    stuck.send_signal(signal.SIGKILL)
    stuck.communicate()
    stdout, stderr = other.communicate(timeout=60)
    report = json.loads(stdout)
    assert (other.returncode, report["encoded"], report["failed"]) == (0, 12, 0), stderr


def encode_beside(
    target: Target, claims: Claims, docs: Path, meanwhile: Any
) -> tuple[EncodeReport, list[str]]:
    """A call during which `meanwhile()` happens once it waits for another, and what it said."""
    said: list[str] = []

    def say(message: str) -> None:
        said.append(message)
        threading.Timer(0.2, meanwhile).start()

    return encode_pages([docs], target, say=say), said


@pytest.mark.parametrize("put_by_other", [True, False], ids=["finished", "given_up"])
def test_a_page_that_another_works_on_is_waited_for(
    target: Target, tmp_path: Path, put_by_other: bool
) -> None:
    """Its embedding is taken if it comes, and made here if the other one gives it up."""
    docs = make_pages(tmp_path / "docs", 3)
    elsewhere = target_for(target.model, tmp_path / "elsewhere")
    good = encode_pages([docs], elsewhere).good
    with claims_in(target.store.root) as others:
        others.take(good[1].key)

        def finish() -> None:
            if put_by_other:
                entry = elsewhere.store.get(good[1].key)
                target.store.put(entry)  # type: ignore[arg-type]
            others.drop(good[1].key)

        report, said = encode_beside(target, others, docs, finish)
    assert said == ["waiting for another process, which is encoding 1 of the pages"]
    assert (report.encoded, report.cached) == ((2, 1) if put_by_other else (3, 0))
    assert [page.path.name for page in report.good] == ["000.png", "001.png", "002.png"]


def test_pages_of_a_known_document_that_others_work_on_are_not_decoded(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_document(tmp_path / "a.tif", 5)
    keys = [page.key for page in encode_pages([path], target).good]
    for key in keys:
        target.store.path(key).unlink()
    from pipeline.encode import reading

    asked: list[Any] = []
    original = reading.DecodeRequest
    monkeypatch.setattr(
        reading, "DecodeRequest", lambda *given: (asked.append(given[2]), original(*given))[1]
    )
    with claims_in(target.store.root) as others:
        others.take(keys[1])
        others.take(keys[3])

        def let_go() -> None:
            others.drop(keys[1])
            others.drop(keys[3])

        report, _ = encode_beside(target, others, path, let_go)
    assert asked[0] == {1, 3, 5} and set().union(*asked[1:]) == {2, 4}
    assert (report.encoded, [page.page for page in report.good]) == (5, [1, 2, 3, 4, 5])


def test_a_page_that_fails_is_let_go(target: Target, tmp_path: Path, monkeypatch: Any) -> None:
    """So that another encoder does not wait for what never comes."""
    docs, taken, dropped = make_pages(tmp_path / "docs", 2), set[str](), set[str]()
    take, drop = Claims.take, Claims.drop
    monkeypatch.setattr(Claims, "take", lambda self, name: (taken.add(name), take(self, name))[1])
    monkeypatch.setattr(Claims, "drop", lambda self, name: (dropped.add(name), drop(self, name))[1])

    def failing(self: stages.TowerAtHand, page: Resized) -> Any:
        if page.placed.read.file.path.name == "000.png":
            return stages._tower_error(page.placed, RuntimeError("no memory"))
        encoded = stub_encode(0.0)(self, page)
        assert isinstance(encoded, Encoded)
        return encoded

    monkeypatch.setattr(stages.TowerAtHand, "encode", failing)
    (docs / "equal.png").write_bytes((docs / "000.png").read_bytes())
    report = encode_pages([docs], target)
    assert (report.encoded, report.failed) == (2, 1)
    assert taken == dropped and len(taken) >= 4  # pages and documents


def test_a_cache_that_cannot_be_written_to_is_said_by_the_first_entry(
    target: Target, tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir()
    os.mkdir(tmp_path / "cache" / "claims")  # stands where the claims should be
    assert encode_pages([make_pages(tmp_path / "docs", 2)], target).encoded == 2
