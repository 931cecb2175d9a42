"""The read-through tier: no request for what it has, never too large, never believed unread."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from makers_cache import TOWER, entry, flipped, put
from s3_server import BUCKET, S3Server, s3_server

from pipeline.cli import main
from pipeline.config import EngineOptions
from pipeline.engines.arguments import ModelSource, engine_environment
from pipeline.errors import StoreError
from pipeline.store import BadEntry, Entry, Manifest, PageRecord, Remote, Store, Tier, media
from pipeline.store.objects import Objects
from pipeline.store.tier import FOLDER, TierFiles

ONE = entry(1)
KEY = ONE.footer.key
MANIFEST = Manifest(False, (PageRecord(1, "a" * 64, 30, 20),))
NAMED = ("d" * 64, "0" * 16)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def near(tmp_path: Path) -> Path:
    """The tier's directory."""
    return tmp_path / "near"


@pytest.fixture
def store(server: S3Server, near: Path, request: pytest.FixtureRequest) -> Store:
    media._objects.cache_clear()
    url = f"s3://{BUCKET}/{request.node.name.partition('[')[0]}-{time.time_ns()}"
    return Store(Remote(url, Tier(near, 1 << 20)), TOWER)


@pytest.fixture
def far(store: Store) -> Store:
    """The same cache without its tier."""
    assert isinstance(store.root, Remote)
    return Store(Remote(store.root.url), TOWER)


def kept(near: Path) -> list[Path]:
    return [path for path in sorted((near / FOLDER / "v1").rglob("*")) if path.is_file()]


def damage(path: Path) -> None:
    path.write_bytes(flipped(path.read_bytes()))


# ---------------------------------------------------------------- reading through


def test_what_was_read_is_not_asked_for_again(far: Store, store: Store, server: S3Server) -> None:
    far.put(ONE)
    far.put_manifest(*NAMED, MANIFEST)
    for time_ in range(2):
        server.requests.clear()
        assert isinstance(store.get(KEY), Entry)
        assert store.manifest(*NAMED) == MANIFEST
        asked = server.count("GET", ".parquet"), server.count("GET", ".json")
        assert asked == ((1, 1) if time_ == 0 else (0, 0))
    server.requests.clear()
    assert store.footer(KEY) == ONE.footer
    assert server.requests == []


def test_what_is_written_goes_to_both(
    far: Store, store: Store, near: Path, server: S3Server
) -> None:
    store.put(ONE)
    store.put_manifest(*NAMED, MANIFEST)
    assert isinstance(far.get(KEY), Entry) and far.manifest(*NAMED) == MANIFEST
    assert len(kept(near)) == 2
    server.requests.clear()
    assert isinstance(store.get(KEY), Entry) and store.manifest(*NAMED) == MANIFEST
    assert server.requests == []


def test_a_footer_alone_is_not_kept(far: Store, store: Store, near: Path) -> None:
    far.put(ONE)
    assert store.footer(KEY) == ONE.footer
    assert kept(near) == []


@pytest.mark.parametrize("how", ["flipped", "cut", "empty"])
def test_a_bad_copy_is_dropped_and_fetched_again(
    far: Store, store: Store, near: Path, server: S3Server, how: str
) -> None:
    store.put(ONE)
    (path,) = kept(near)
    whole = path.read_bytes()
    if how == "flipped":
        damage(path)
    else:
        path.write_bytes(whole[: len(whole) // 2 if how == "cut" else 0])
    found = store.footer(KEY)  # the cache's own, or this one's if what counts of it is whole
    assert found is not None
    assert (found.key, found.rows, found.width) == (KEY, ONE.footer.rows, ONE.footer.width)
    assert (found.grid, found.digest) == (ONE.footer.grid, ONE.footer.digest)
    server.requests.clear()
    assert isinstance(store.get(KEY), Entry)
    assert server.count("GET", ".parquet") == 1 and server.count("DELETE") == 0
    assert path.read_bytes() == whole
    assert far.verify() == []


def test_a_bad_entry_of_the_cache_is_not_kept(far: Store, store: Store, near: Path) -> None:
    medium = media.medium_of(far.root)
    medium.write(far.name(KEY), b"bad")
    assert isinstance(store.get(KEY), BadEntry)
    assert kept(near) == []
    assert store.quarantine(KEY, "bad") is not None
    assert not store.has(KEY)
    store.put(ONE)
    assert isinstance(far.get(KEY), Entry)


def test_only_the_cache_says_what_it_has(far: Store, store: Store) -> None:
    """A machine with a copy must not leave the cache without the entry."""
    store.put(ONE)
    media.medium_of(far.root).delete(far.name(KEY))
    media._objects.cache_clear()
    assert not store.has(KEY)
    store.put(ONE)
    assert isinstance(far.get(KEY), Entry)


def test_verify_and_export_read_the_cache_itself(far: Store, store: Store, tmp_path: Path) -> None:
    store.put(ONE)
    medium = media.medium_of(far.root)
    medium.delete(far.name(KEY))
    medium.write(far.name(KEY), b"bad")
    assert len(store.verify()) == 1
    words = ["cache", "export", tmp_path / "a.tar", "--cache", far.root, "--json"]
    words += ["--cache-local", tmp_path / "near", "--cache-local-bytes", "1MiB"]
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 3 and "left out" in result.stderr


def test_it_may_be_deleted_at_any_time(store: Store, near: Path) -> None:
    store.put(ONE)
    shutil.rmtree(near)
    assert isinstance(store.get(KEY), Entry)
    assert len(kept(near)) == 1
    shutil.rmtree(near / FOLDER / "v1")
    assert isinstance(store.get(KEY), Entry)
    (near / FOLDER / "bytes").unlink()
    store.put(entry(2))
    assert len(kept(near)) == 2


def test_the_cache_is_told_of_a_use_once_a_day(
    far: Store, store: Store, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far.put(ONE)
    told: list[str] = []
    monkeypatch.setattr(Objects, "note_use", lambda self, name, known=None: told.append(name))
    for _ in range(3):
        store.get(KEY)
    assert told == [store.name(KEY)]
    (path,) = kept(near)
    os.utime(path, (time.time(), time.time() - 90_000))
    store.get(KEY)
    store.footer(KEY)
    assert told == [store.name(KEY)] * 2


# ---------------------------------------------------------------- how much it takes


def taken(directory: Path) -> int:
    """Bytes of all files but the total; what goes meanwhile counts not."""
    total = 0
    for path in (directory / FOLDER / "v1").rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    tier = TierFiles(tmp_path, 1000)
    for name in "abcdefghij":
        tier.keep(f"v1/t/{name}", bytes(100))
    assert tier.read("v1/t/a") == bytes(100)
    tier.keep("v1/t/k", bytes(100))
    assert tier.read("v1/t/a") is not None and tier.read("v1/t/k") is not None
    assert tier.read("v1/t/b") is None and tier.read("v1/t/c") is None
    assert tier.read("v1/t/d") is not None
    assert taken(tmp_path) <= 1000


def test_what_is_larger_than_the_tier_is_not_kept(tmp_path: Path) -> None:
    tier = TierFiles(tmp_path, 1000)
    tier.keep("v1/t/a", bytes(600))
    tier.keep("v1/t/b", bytes(1001))
    assert tier.read("v1/t/b") is None and tier.read("v1/t/a") is not None
    tier.keep("v1/t/c", bytes(1000))
    assert taken(tmp_path) == 1000


def test_a_smaller_budget_holds_from_the_next_file_on(tmp_path: Path) -> None:
    for number in range(10):
        TierFiles(tmp_path, 1000).keep(f"v1/t/{number}", bytes(100))
    TierFiles(tmp_path, 500).keep("v1/t/x", bytes(100))
    assert taken(tmp_path) <= 500


def test_a_directory_that_is_a_cache_is_not_swept(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    tier = TierFiles(tmp_path, 1000)
    for number in range(20):
        tier.keep(f"v1/t/{number}", bytes(100))
    assert path.is_file()


@pytest.mark.parametrize("text", ["", "x", "-5", "0", "99999999999"])
def test_a_total_that_is_wrong_is_found_out(tmp_path: Path, text: str) -> None:
    tier = TierFiles(tmp_path, 1000)
    for number in range(5):
        tier.keep(f"v1/t/{number}", bytes(100))
    (tmp_path / FOLDER / "bytes").write_text(text)
    tier.keep("v1/t/x", bytes(100))
    assert taken(tmp_path) == 600


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    tier = TierFiles(tmp_path, 1000)
    tier.keep("v1/t/a", bytes(100))
    (tmp_path / FOLDER / "v1" / "t" / ".b.7.tmp").write_bytes(bytes(400))
    for number in range(10):
        tier.keep(f"v1/t/{number}", bytes(100))
    assert not list(tmp_path.rglob("*.tmp"))


def _fill(directory: Path, seed: int) -> None:
    tier = TierFiles(directory, 20_000)
    for number in range(150):
        tier.keep(f"v1/t/{seed}-{number}", bytes(100 + 7 * number))


def test_several_processes_stay_within_it_together(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    fillers = [context.Process(target=_fill, args=(tmp_path, seed)) for seed in range(3)]
    for filler in fillers:
        filler.start()
    highest = 0
    while any(filler.is_alive() for filler in fillers):
        highest = max(highest, taken(tmp_path))
    assert [filler.exitcode for filler in fillers] == [0, 0, 0]
    assert 10_000 < highest <= 20_000


def test_a_directory_that_can_not_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file")
    with pytest.raises(StoreError) as error:
        TierFiles(tmp_path, 1000).keep("v1/t/a", b"x")
    assert error.value.message.startswith(f"can't write `{tmp_path}/{FOLDER}/v1/t/a`: ")
    assert "`--cache-local`" in error.value.hint


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cache-local", "x"], "a local tier needs both"),
        (["--cache-local-bytes", "1GB"], "a local tier needs both"),
        (["--cache-local", "x", "--cache-local-bytes", "1GB"], "is for a cache elsewhere"),
    ],
)
def test_a_tier_needs_a_size_and_a_cache_elsewhere(words: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["cache", "stats", *words])
    assert result.exit_code == 2 and message in result.stderr


def test_an_engine_is_told_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for cache, expected in (
        (Path("cache"), (f"{tmp_path}/cache", "", "")),
        (Remote("s3://b/x"), ("s3://b/x", "", "")),
        (Remote("s3://b/x", Tier(Path("near"), 7)), ("s3://b/x", f"{tmp_path}/near", "7")),
    ):
        model = ModelSource(tmp_path, ("m",), cache, TOWER)
        found = engine_environment(model, EngineOptions())
        names = ("CACHE", "CACHE_LOCAL", "CACHE_LOCAL_BYTES")
        assert tuple(found[f"PIPELINE_CONNECTOR_{name}"] for name in names) == expected
