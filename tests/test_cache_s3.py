"""The cache in a real S3 server: two encoders, kills, flipped bytes, faults; as on a disk."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
import s3_encoder
from click.testing import CliRunner, Result
from makers_cache import DAY_S, OTHER_TOWER, TOWER, entry, files_of, flipped
from PIL import Image
from s3_server import BUCKET, S3Server, s3_server

from pipeline.cli import main
from pipeline.encode import EncodeReport, target_for
from pipeline.errors import StoreError, UsageError
from pipeline.store import (
    BadEntry,
    Entry,
    Location,
    Manifest,
    PageRecord,
    Remote,
    Store,
    location_of,
    media,
    objects,
)
from pipeline.store.census import take_census
from pipeline.store.hold import hold_alone, hold_shared, is_in_use
from pipeline.store.media import medium_of
from pipeline.store.repair import repair
from pipeline.store.sweep import Budget, sweep

PAGES = 12


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def root(server: S3Server, request: pytest.FixtureRequest) -> Iterator[Remote]:
    """A cache in the bucket that no other test uses; what lies beside it is never touched."""
    prefix = f"{request.node.name.partition('[')[0]}-{time.time_ns()}/cache"
    beside = [f"{prefix}2/v1/{TOWER}/aa/x.parquet", f"{prefix}-notes.txt", f"{prefix}.parquet"]
    for key in beside:
        client().put_object(Bucket=BUCKET, Key=key, Body=b"not ours")
    server.busy, server.denied = 0, frozenset()
    yield Remote(f"s3://{BUCKET}/{prefix}")
    server.busy, server.denied = 0, frozenset()
    anew()
    for key in beside:
        assert client().get_object(Bucket=BUCKET, Key=key)["Body"].read() == b"not ours"


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a few pages."""
    directory = tmp_path_factory.mktemp("s3") / "docs"
    directory.mkdir()
    for number in range(PAGES):
        values = np.random.default_rng(number).integers(0, 256, (64, 96, 3), dtype=np.uint8)
        Image.fromarray(values).save(directory / f"{number:02}.png")
    return directory


@pytest.fixture(autouse=True)
def quick_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_encoder.FAMILY, "load_tower", s3_encoder.load_tower)
    monkeypatch.setattr(s3_encoder, "PAGE_S", 0.0)


@pytest.fixture(scope="module")
def zygote(server: S3Server) -> multiprocessing.context.ForkServerContext:
    """Processes that have imported everything from the start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["s3_encoder", "s3fs"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    try:
        context.Process(target=print).start()  # the server starts with the first, and this path
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


def client() -> Any:
    return boto3.client("s3")


def anew() -> None:
    """From here on as in a new process: nothing is known of what the bucket holds."""
    media._objects.cache_clear()


def prefix_of(root: Remote) -> str:
    return root.url.removeprefix(f"s3://{BUCKET}/")


def objects_in(root: Remote, ending: str = "") -> dict[str, bytes]:
    """What lies below the cache, by its path from there."""
    found = {}
    for page in (
        client()
        .get_paginator("list_objects_v2")
        .paginate(Bucket=BUCKET, Prefix=f"{prefix_of(root)}/")
    ):
        for each in page.get("Contents", ()):
            if each["Key"].endswith(ending):
                body = client().get_object(Bucket=BUCKET, Key=each["Key"])["Body"].read()
                found[each["Key"].removeprefix(f"{prefix_of(root)}/")] = body
    return found


def put_object(root: Remote, name: str, data: bytes) -> None:
    client().put_object(Bucket=BUCKET, Key=f"{prefix_of(root)}/{name}", Body=data)


def delete_object(root: Remote, name: str) -> None:
    client().delete_object(Bucket=BUCKET, Key=f"{prefix_of(root)}/{name}")


def flip(root: Remote, name: str) -> None:
    """Another bit in an entry's payload."""
    put_object(root, name, flipped(objects_in(root)[name]))


def encode(docs: Path, root: Location) -> EncodeReport:
    """As a new process does it."""
    anew()
    return s3_encoder.encode(docs, root)


def command(*words: object, code: int = 0) -> Result:
    anew()
    result = CliRunner().invoke(main, [*map(str, words)])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


# ---------------------------------------------------------------- encoders


def test_two_encoders_at_once_fill_the_cache(
    docs: Path, root: Remote, tmp_path: Path, zygote: multiprocessing.context.ForkServerContext
) -> None:
    outs = [tmp_path / "first.json", tmp_path / "second.json"]
    both = [zygote.Process(target=s3_encoder.encode_alone, args=(docs, root, out)) for out in outs]
    for process in both:
        process.start()
    for process, out in zip(both, outs, strict=True):
        process.join(120)
        assert process.exitcode == 0
        report = json.loads(out.read_text())
        assert (report["pages"], report["encoded"] + report["cached"]) == (PAGES, PAGES)
    assert len(objects_in(root, ".parquet")) == PAGES
    assert Store(root, TOWER).verify() == []
    again = encode(docs, root)
    assert (again.encoded, again.cached) == (0, PAGES)


def test_after_a_kill_only_the_rest_is_encoded(
    docs: Path,
    root: Remote,
    tmp_path: Path,
    zygote: multiprocessing.context.ForkServerContext,
) -> None:
    out = tmp_path / "report.json"
    process = zygote.Process(target=s3_encoder.encode_alone, args=(docs, root, out))
    process.start()
    until = time.monotonic() + 90
    while len(objects_in(root, ".parquet")) < 3:
        assert process.is_alive() and time.monotonic() < until
    process.kill()
    process.join()
    there = len(objects_in(root, ".parquet"))
    assert 3 <= there < PAGES and not out.exists()
    assert Store(root, TOWER).verify() == []
    again = encode(docs, root)
    assert (again.encoded, again.cached) == (PAGES - there, there)
    assert Store(root, TOWER).verify() == []


def test_what_is_encoded_here_is_encoded_the_same_there(
    docs: Path, root: Remote, tmp_path: Path
) -> None:
    encode(docs, root)
    encode(docs, tmp_path)
    assert objects_in(root) == files_of(tmp_path)


def test_a_rerun_asks_for_directories_not_for_pages(
    docs: Path, root: Remote, server: S3Server
) -> None:
    encode(docs, root)
    server.requests.clear()
    assert encode(docs, root).cached == PAGES
    assert server.count("HEAD", ".parquet") == server.count("GET", ".parquet") == 0
    assert server.count("GET", ".json") == PAGES  # manifests; a local tier spares them


def test_a_deleted_object_is_encoded_again(docs: Path, root: Remote) -> None:
    encode(docs, root)
    before = objects_in(root, ".parquet")
    lost = min(before)
    delete_object(root, lost)
    report = encode(docs, root)
    assert (report.encoded, report.cached) == (1, PAGES - 1)
    assert objects_in(root, ".parquet") == before


def test_a_flipped_byte_is_noticed_quarantined_and_encoded_again(docs: Path, root: Remote) -> None:
    encode(docs, root)
    before = objects_in(root, ".parquet")
    bad = min(before)
    flip(root, bad)
    store = target_for(s3_encoder.MODEL, root).store
    key = Path(bad).stem
    found = store.get(key)
    assert isinstance(found, BadEntry)
    assert store.quarantine(key, found.why) is not None
    assert encode(docs, root).encoded == 1
    assert objects_in(root, ".parquet").items() >= before.items()
    (reason,) = objects_in(root, ".txt").values()
    assert reason.decode() == f"{found.why}\n"
    assert store.verify() == []


# ---------------------------------------------------------------- the store


@pytest.fixture
def store(root: Remote) -> Store:
    return Store(root, TOWER)


KEY = entry(1).footer.key


def test_an_entry_comes_back(store: Store, root: Remote) -> None:
    put = entry(1)
    assert not store.has(KEY) and store.footer(KEY) is None
    assert store.get(KEY) == BadEntry(KEY, "there is no such entry")
    size = store.put(put)
    assert store.has(KEY) and store.footer(KEY) == put.footer
    got = store.get(KEY)
    assert isinstance(got, Entry) and np.array_equal(got.bits(), put.bits())
    assert {name: len(data) for name, data in objects_in(root).items()} == {
        f"v1/{TOWER}/{KEY[:2]}/{KEY}.parquet": size
    }


def test_a_key_is_never_overwritten(store: Store, root: Remote) -> None:
    store.put(entry(1))
    before = objects_in(root)
    anew()
    put_object(root, f"v1/{TOWER}/other", b"")
    medium_of(root).write(store.name(KEY), b"bad")
    assert objects_in(root).items() >= before.items()


def test_without_conditions_a_key_is_read_back_and_never_overwritten(
    store: Store, root: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with stores that do not know If-None-Match."""
    medium = medium_of(root)
    assert isinstance(medium, objects.Objects)
    pipe, broken = medium._files.pipe_file, [True]

    def unconditional(path: str, body: bytes, mode: str = "overwrite") -> None:
        if mode == "create":
            raise NotImplementedError
        pipe(path, body[:-1] if broken and broken.pop() else body)

    monkeypatch.setattr(medium._files, "pipe_file", unconditional)
    store.put(entry(1))
    assert isinstance(store.get(KEY), Entry)
    before = objects_in(root)
    medium.write(store.name(KEY), b"bad")
    assert objects_in(root) == before
    monkeypatch.setattr(medium._files, "pipe_file", lambda *given, **named: None)
    with pytest.raises(StoreError, match="does not hold what was written to it"):
        store.put(entry(2))


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_what_was_cut_is_a_miss(store: Store, root: Remote, length: int) -> None:
    store.put(entry(1))
    name = store.name(KEY)
    put_object(root, name, objects_in(root)[name][:length])
    assert isinstance(store.get(KEY), BadEntry)
    assert store.footer(KEY) is None
    assert [problem.path for problem in store.verify()] == [name.removeprefix("v1/")]


def test_a_listed_entry_that_is_gone_is_a_miss_to_whoever_reads_it(
    store: Store, root: Remote
) -> None:
    store.put(entry(1))
    delete_object(root, store.name(KEY))
    assert isinstance(store.get(KEY), BadEntry)
    store.quarantine(KEY, "it is gone")
    assert not store.has(KEY)
    store.put(entry(1))
    assert store.has(KEY) and isinstance(store.get(KEY), Entry)


def test_what_comes_after_the_listing_is_found(store: Store, root: Remote) -> None:
    assert not store.has(KEY)
    other = objects.Objects(root.url)
    other.write(store.name(KEY), b"by another process")
    assert store.has(KEY)


def test_manifests_are_written_once_and_replaced_where_they_differ(
    store: Store, server: S3Server
) -> None:
    one = Manifest(False, (PageRecord(1, "a" * 64, 30, 20),))
    other = Manifest(False, (PageRecord(1, "b" * 64, 30, 20),))
    assert store.manifest("d" * 64, "0" * 16) is None
    store.put_manifest("d" * 64, "0" * 16, one)
    server.requests.clear()
    store.put_manifest("d" * 64, "0" * 16, one)
    assert server.count("PUT") == 0
    store.put_manifest("d" * 64, "0" * 16, other)
    assert store.manifest("d" * 64, "0" * 16) == other


@pytest.mark.parametrize("read", ["has", "get", "footer"])
@pytest.mark.parametrize("is_due", [True, False])
def test_a_use_is_noted_at_most_daily(
    store: Store, root: Remote, monkeypatch: pytest.MonkeyPatch, read: str, is_due: bool
) -> None:
    store.put(entry(1))
    before = medium_of(root).state(store.name(KEY))
    time.sleep(1.1)  # times are in seconds there
    anew()
    medium = medium_of(root)
    assert isinstance(medium, objects.Objects) and before is not None
    monkeypatch.setattr(objects, "is_due", lambda state: is_due)
    assert getattr(store, read)(KEY)
    medium.finish()
    after = medium.state(store.name(KEY))
    assert after is not None and (after.st_mtime > before.st_mtime) is is_due
    assert isinstance(store.get(KEY), Entry)


# ---------------------------------------------------------------- commands


def fill(root: Remote) -> list[str]:
    """Three entries of two towers and a manifest; the names of the entries."""
    names = []
    for seed, tower in ((1, TOWER), (2, TOWER), (3, OTHER_TOWER)):
        made = entry(seed, tower)
        Store(root, tower).put(made)
        names.append(Store(root, tower).name(made.footer.key))
    manifest = Manifest(False, (PageRecord(1, "a" * 64, 30, 20),))
    Store(root, TOWER).put_manifest("d" * 64, "0" * 16, manifest)
    return names


def record(*words: object, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command("cache", *words, "--json", code=code).stdout)
    return found


def test_stats_verify_and_repair(root: Remote, tmp_path: Path) -> None:
    names = fill(root)
    found = record("stats", "--cache", root)
    assert (found["entries"], len(found["towers"]), found["documents"]["files"]) == (3, 2, 1)
    assert {tower["family"] for tower in found["towers"]} == {"qwen3_vl"}
    assert found["bytes"] == sum(map(len, objects_in(root, ".parquet").values()))
    assert record("verify", "--cache", root)["problems"] == []
    flip(root, names[0])
    put_object(root, "v1/notes.txt", b"?")
    state = tmp_path / "state"
    problems = record("verify", "--cache", root, "--state", state, code=3)["problems"]
    assert {each["path"] for each in problems} == {names[0].removeprefix("v1/"), "notes.txt"}
    (done,) = record("repair", "--cache", root, "--state", state)["repaired"]
    assert done["path"] == names[0]  # what does not belong there is too young to be moved
    assert objects_in(root, "notes.txt")
    (done,) = record("repair", "--cache", root, "--grace", "0m")["repaired"]
    assert done["path"] == "v1/notes.txt" and done["moved_to"].startswith("quarantine/")
    assert record("verify", "--cache", root)["problems"] == []


def test_gc_keeps_off_what_is_young(root: Remote) -> None:
    names = fill(root)
    dry = record("gc", "--cache", root, "--max-bytes", "1")
    assert (dry["evicted"], dry["over_budget_bytes"] > 0) == (0, True)
    assert record("stats", "--cache", root, "--max-bytes", "1")["gc"]["evicted"] == 0
    assert record("gc", "--cache", root, "--max-bytes", "1", "--apply")["evicted"] == 0
    assert len(objects_in(root, ".parquet")) == 3
    dry = record("gc", "--cache", root, "--max-bytes", "1", "--grace", "0m")
    assert (dry["evicted"], len(objects_in(root, ".parquet"))) == (3, 3)
    words = ("gc", "--cache", root, "--max-bytes", "1", "--grace", "0m", "--apply")
    assert record(*words)["evicted"] == 3
    assert not set(objects_in(root)) & set(names)


def test_gc_deletes_nothing_that_was_used_since_it_was_counted(root: Remote) -> None:
    used = fill(root)[0]
    time.sleep(1.1)

    def needed() -> tuple[str, ...]:
        return ()

    medium = medium_of(root)
    listed = medium.listed

    def then_used(directory: str) -> object:
        found = listed(directory)
        if used.startswith(f"{directory}/") and directory.count("/") == 2:
            put_object(root, used, objects_in(root)[used])
        return found

    medium.listed = then_used  # type: ignore[method-assign, assignment]
    swept = sweep(root, Budget(1), needed=needed, apply=True, grace_s=0)
    assert swept.evicted == 2
    assert list(objects_in(root, ".parquet")) == [used]


def test_entries_are_carried_there_and_back(root: Remote, tmp_path: Path) -> None:
    fill(root)
    out = record("export", tmp_path / "a.tar", "--cache", root)
    assert (out["entries"], out["manifests"], out["problems"]) == (3, 1, [])
    record("import", tmp_path / "a.tar", "--cache", tmp_path / "cache")
    assert files_of(tmp_path / "cache") == objects_in(root)
    one = record("export", tmp_path / "b.tar", "--cache", root, "--tower", "88")
    assert (one["entries"], one["manifests"]) == (1, 1)
    elsewhere = Remote(f"{root}-there")
    got = record("import", tmp_path / "a.tar", "--cache", elsewhere)
    assert (got["entries"], got["manifests"]) == (3, 1)
    assert objects_in(elsewhere) == objects_in(root)
    assert record("import", tmp_path / "a.tar", "--cache", elsewhere)["there"] == 4


def test_path_shows_where_a_page_lies(docs: Path, root: Remote) -> None:
    page = docs / "00.png"
    words = ("path", page, "--cache", root)
    missing = record(*words)
    assert (missing["state"], missing["manifest_there"]) == ("missing", False)
    encode(docs, root)
    found = record(*words)
    assert (found["state"], found["manifest_there"]) == ("cached", True)
    assert found["path"] == f"{root}/v1/{found['tower']}/{found['key'][:2]}/{found['key']}.parquet"
    flip(root, found["path"].removeprefix(f"{root}/"))
    assert record(*words)["state"] == "bad"


def test_the_lock_is_a_look_at_the_formats(root: Remote) -> None:
    fill(root)
    with hold_shared(root), hold_shared(root), hold_alone(root) as before_ns:
        assert is_in_use(root)
        assert abs(before_ns / 1e9 - (time.time() - 2 * DAY_S)) < 60
    assert "lock" not in objects_in(root)


def test_a_newer_format_is_refused_and_an_older_one_left_alone(docs: Path, root: Remote) -> None:
    fill(root)
    put_object(root, "v0/x", b"old")
    assert "is of an older format" in command("cache", "stats", "--cache", root).stderr
    put_object(root, "v2/x", b"new")
    for words in (["cache", "stats"], ["cache", "repair"], ["encode", docs]):
        result = command(*words, "--cache", root, code=1)
        assert f"`{root}/v2` was written by a newer version" in result.stderr


def test_a_cache_that_is_not_there_is_an_error(root: Remote) -> None:
    result = command("cache", "stats", "--cache", root, code=1)
    assert result.stderr == (
        f"Error: there is no cache `{root}`\n\n"
        "hint: `pipeline encode PATH` makes one; check `--cache DIR`\n"
    )


def test_counting_takes_no_request_for_an_entry(root: Remote, server: S3Server) -> None:
    fill(root)
    server.requests.clear()
    assert take_census(root).entries == 3
    assert server.count("HEAD") == 0 and server.count("GET", ".parquet") == 0


def test_a_placeholder_of_a_directory_is_no_file(root: Remote) -> None:
    fill(root)
    for name in ("", "v1/", f"v1/{TOWER}/"):
        put_object(root, name, b"")
    assert list(repair(root, grace_s=0)) == []
    assert take_census(root).foreign.files == 0


# ---------------------------------------------------------------- faults


def test_a_busy_store_is_asked_again(store: Store, server: S3Server) -> None:
    server.busy = 2
    store.put(entry(1))
    server.busy = 2
    assert isinstance(store.get(KEY), Entry)
    assert server.busy == 0


ONE_ATTEMPT = {"AWS_MAX_ATTEMPTS": "1"}


@pytest.fixture
def without_retries(monkeypatch: pytest.MonkeyPatch, server: S3Server) -> None:
    for name, text in (server.environment() | ONE_ATTEMPT).items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr("pipeline.store.faults._RECONNECTIONS", 1)


def failing(docs: Path, url: str, *words: str) -> list[str]:
    """What commands say about a cache that can't be used: error and hint."""
    said = []
    for call in (["cache", "stats"], ["encode", docs]):
        result = command(*call, "--cache", url, *words, code=1)
        assert "Traceback" not in result.stderr
        said.append(result.stderr.removeprefix("model: bundled tiny-reader\n"))
    return said


def test_a_bucket_that_is_not_there_is_an_error(docs: Path, without_retries: None) -> None:
    for said in failing(docs, "s3://no-such-bucket/x"):
        assert said == (
            "Error: there is no such bucket: `s3://no-such-bucket/x`\n\n"
            "hint: make it, or check its name and `AWS_ENDPOINT_URL`\n"
        )


def test_what_is_not_allowed_is_an_error(
    docs: Path, root: Remote, server: S3Server, without_retries: None
) -> None:
    server.denied = frozenset({"GET"})
    for said in failing(docs, root.url):
        assert said.startswith(f"Error: access to `{root}` is denied: Access Denied\n\nhint: check")
    server.denied = frozenset({"PUT"})
    result = command("encode", docs, "--cache", root, code=1)
    assert f"Error: access to `{root}/v1/" in result.stderr and "is denied" in result.stderr
    assert objects_in(root) == {}


def test_an_endpoint_that_is_not_there_is_an_error(
    docs: Path, without_retries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for said in failing(docs, "s3://bucket/x"):
        assert said.startswith("Error: can't list `s3://bucket/x`: Could not connect")
        assert "\n\nhint: check the URL, the network and `AWS_ENDPOINT_URL`; what" in said


def test_no_credentials_are_an_error(
    docs: Path, tmp_path: Path, without_retries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    for said in failing(docs, "s3://bucket/x"):
        assert said == (
            "Error: no credentials for `s3://bucket/x`: Unable to locate credentials\n\n"
            "hint: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE\n"
        )


def test_a_missing_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['s3fs'] = None\n"
        "from pipeline.cli import main; main(['cache', 'stats', '--cache', 's3://bucket/x'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "Error: no file system opens `s3://bucket/x`: Install s3fs to access S3\n\n"
        "hint: pip install 'vlm-page-pipeline[s3]'\n"
    )


# ---------------------------------------------------------------- locations


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cache", Path("cache")),
        ("file:///data/a%20b", Path("/data/a b")),
        ("s3://bucket", Remote("s3://bucket")),
        ("S3://bucket/a/", Remote("s3://bucket/a")),
        ("memory://x", Remote("memory://x")),
        ("a:b/c", Path("a:b/c")),
    ],
)
def test_a_url_or_a_directory(text: str, expected: object) -> None:
    assert location_of(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "s3://",
        "s3://b/../x",
        "s3://b/./x",
        "s3://b//x",
        "https://host/x",
        "file://host/x",
        "a::s3://b",
    ],
)
def test_what_names_no_place_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        location_of(text)


def test_a_local_cache_imports_no_object_store(tmp_path: Path) -> None:
    Store(tmp_path, TOWER).put(entry(1))
    code = (
        "import sys; from pathlib import Path; from pipeline.store import *\n"
        "store = Store(Path(sys.argv[1]), sys.argv[2])\n"
        "assert store.has(sys.argv[3]) and isinstance(store.get(sys.argv[3]), Entry)\n"
        "assert not {'fsspec', 's3fs', 'botocore', 'pipeline.store.objects'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path, TOWER, KEY], check=True)
