"""What was put is what is got, or nothing is; a damaged entry is never an answer."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from makers_cache import SPEC, TOWER

from pipeline.errors import Failure, Reason, Stage, StoreError
from pipeline.store import BadEntry, Entry, Manifest, PageRecord, Store
from pipeline.store.entry import to_parquet


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "cache", TOWER)
    yield store
    assert store.verify() == []


def entry(seed: int = 0, rows: int = 6, width: int = 24, key: str | None = None) -> Entry:
    """An entry of finite values; rows = 2 · columns / 2² of the grid."""
    values = np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)
    return Entry.from_bits(
        (values.view(np.uint32) >> 16).astype(np.uint16),
        key=key or f"{seed:064x}",
        spec=SPEC,
        tower_fingerprint=TOWER,
        grid=(1, 2, 2 * rows),
        source_size=(100, 200),
        made_by="test",
    )


def test_an_entry_comes_back_bit_for_bit(store: Store) -> None:
    import torch

    put = entry()
    assert store.put(put) == store.path(put.footer.key).stat().st_size
    got = store.get(put.footer.key)
    assert isinstance(got, Entry) and got.footer == put.footer
    assert np.array_equal(got.bits(), put.bits())
    tensor = got.tensor()
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.bfloat16, (6, 24))
    assert np.array_equal(tensor.view(torch.uint16).numpy(), put.bits())
    assert tensor.is_contiguous() and tensor.storage_offset() == 0


def test_the_path_follows_from_the_key(store: Store) -> None:
    key = "ab" + "0" * 62
    assert store.path(key) == store.root / "v1" / TOWER / "ab" / f"{key}.parquet"
    assert not store.has(key) and store.footer(key) is None
    assert store.get(key) == BadEntry(key, "there is no such entry")
    store.put(entry(key=key))
    assert store.has(key)


def test_the_footer_is_read_without_the_payload(store: Store) -> None:
    put = entry(rows=400, width=400)
    store.put(put)
    path = store.path(put.footer.key)
    data = path.read_bytes()
    try:
        path.write_bytes(bytes(len(data) - 30_000) + data[-30_000:])
        assert store.footer(put.footer.key) == put.footer
        assert isinstance(store.get(put.footer.key), BadEntry)
    finally:
        path.write_bytes(data)


def test_a_key_is_never_overwritten(store: Store) -> None:
    store.put(entry(key="0" * 64))
    before = store.path("0" * 64).read_bytes()
    store.put(entry(seed=1, key="0" * 64))
    assert store.path("0" * 64).read_bytes() == before


# ---------------------------------------------------------------- damage


def test_a_flipped_bit_is_noticed_or_harmless(tmp_path: Path) -> None:
    """All through an entry's file: what is got is either refused or the same values."""
    store = Store(tmp_path, TOWER)
    put = entry(rows=2, width=8)
    store.put(put)
    path = store.path(put.footer.key)
    whole = path.read_bytes()
    payload = whole.index(bytes(put.low))
    for place in [*range(0, len(whole), 7), *range(payload, payload + len(put.low))]:
        data = bytearray(whole)
        data[place] ^= 1 << (place % 8)
        path.write_bytes(data)
        got = store.get(put.footer.key)
        if isinstance(got, Entry):
            assert not payload <= place < payload + len(put.low)
            assert got.footer == put.footer and np.array_equal(got.bits(), put.bits()), place


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 0.999])
def test_half_a_file_is_a_bad_entry_and_a_problem(tmp_path: Path, share: float) -> None:
    store = Store(tmp_path, TOWER)
    store.put(entry())
    path = store.path(entry().footer.key)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    assert isinstance(store.get(entry().footer.key), BadEntry)
    assert store.footer(entry().footer.key) is None
    assert [store.root / "v1" / problem.path for problem in store.verify()] == [path]


def test_an_entry_under_another_name_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path, TOWER)
    store.put(entry())
    other = "f" * 64
    store.path(other).parent.mkdir(parents=True)
    store.path(entry().footer.key).rename(store.path(other))
    got = store.get(other)
    assert isinstance(got, BadEntry) and "holds the entry of key" in got.why
    assert store.footer(other) is None


def test_an_entry_of_another_tower_is_refused(tmp_path: Path) -> None:
    Store(tmp_path, TOWER).put(entry())
    (tmp_path / "v1" / TOWER).rename(tmp_path / "v1" / ("8" * 64))
    got = Store(tmp_path, "8" * 64).get(entry().footer.key)
    assert isinstance(got, BadEntry) and "made by tower 777777777777" in got.why


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rows": 5}, "5 rows do not fit grid [1, 2, 12]"),
        ({"grid": (1, 3, 8)}, "6 rows do not fit grid [1, 3, 8]"),
        ({"grid": (1, 12, 2)}, "the payload does not match its digest"),
        ({"width": 23}, "planes of 144 and 144 bytes, expected 138"),
        ({"dtype": "float16"}, "values are float16, expected bfloat16"),
        ({"finite": False}, "it holds values that are not finite"),
        ({"digest": "0" * 64}, "the payload does not match its digest"),
        ({"tower_fingerprint": "8" * 64}, "it was made by tower 888888888888…"),
        ({"format_version": 2}, "format version 2, expected 1"),
        ({"spec_json": "{}"}, "its spec is unreadable"),
    ],
)
def test_an_entry_that_contradicts_itself_is_not_written(
    store: Store, change: dict[str, object], why: str
) -> None:
    bad = replace(entry(), footer=replace(entry().footer, **change))  # type: ignore[arg-type]
    with pytest.raises(StoreError, match=re.escape(why)):
        store.put(bad)
    assert not store.has(entry().footer.key)


@pytest.mark.parametrize("value", [0x7F80, 0xFF80, 0x7FC0])
def test_a_value_that_is_not_finite_is_never_stored(store: Store, value: int) -> None:
    bits = np.zeros((6, 24), np.uint16)
    bits[3, 7] = value
    bad = Entry.from_bits(
        bits,
        key="0" * 64,
        spec=SPEC,
        tower_fingerprint=TOWER,
        grid=(1, 2, 12),
        source_size=(1, 1),
    )
    assert not bad.footer.finite
    with pytest.raises(StoreError, match="not finite"):
        store.put(bad)


def test_quarantine_moves_the_entry_with_its_reason(store: Store) -> None:
    store.put(entry())
    moved = store.quarantine(entry().footer.key, "for a test")
    assert moved is not None and moved.startswith("quarantine/")
    assert (store.root / moved).with_suffix(".txt").read_text() == "for a test\n"
    assert not store.has(entry().footer.key)
    assert store.quarantine(entry().footer.key, "again") is None


def test_verify_names_what_does_not_belong(tmp_path: Path) -> None:
    store = Store(tmp_path, TOWER)
    store.put(entry())
    folder = store.path(entry().footer.key).parent
    (folder / f".{'0' * 64}.parquet.1.ab.tmp").write_bytes(b"half")
    (folder / "00notes.txt").write_text("?")
    (folder / f"{'f' * 64}.parquet").write_bytes(b"")
    assert [problem.why for problem in store.verify()] == [
        "a temporary file that was left over",
        "a file that does not belong here",
        "it lies in the wrong directory",
    ]


# ---------------------------------------------------------------- write law


def test_a_write_that_fails_stops_with_path_and_hint(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError) as error:
        store.put(entry())
    message = re.fullmatch(
        r"can't write `(.*)`: No space left on device \(([\d,]+) bytes needed\)",
        error.value.message,
    )
    assert message is not None and message[1] == str(store.path(entry().footer.key))
    assert int(message[2].replace(",", "")) == len(to_parquet(entry()))
    assert error.value.hint == "free some space or choose another directory with `--cache DIR`"
    assert not [path for path in store.root.rglob("*") if path.is_file()]


def test_a_directory_in_the_place_of_an_entry_is_an_error_and_no_hit(store: Store) -> None:
    key = entry().footer.key
    store.path(key).mkdir(parents=True)
    assert not store.has(key)
    with pytest.raises(StoreError) as error:
        store.put(entry())
    assert error.value.hint == "a directory stands where a file should be; move it away"
    assert not [path for path in store.root.rglob("*") if path.is_file()]
    assert [problem.why for problem in store.verify()] == [error.value.hint.partition(";")[0]]
    store.path(key).rmdir()


def test_a_cache_of_an_impossible_name_is_an_error(tmp_path: Path) -> None:
    store = Store(tmp_path / ("a" * 300), TOWER)
    assert not store.has(entry().footer.key)
    with pytest.raises(StoreError, match="File name too long"):
        store.put(entry())


def test_a_cache_that_is_no_directory_is_an_error_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(StoreError) as error:
        Store(tmp_path / "cache", TOWER).put(entry())
    assert "a file stands where a directory should be" in error.value.hint


def test_data_are_synced_before_the_name_and_the_directory_after(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, swap = os.fsync, os.replace

    def watched_fsync(descriptor: int) -> None:
        calls.append("sync " + ("dir" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file"))
        fsync(descriptor)

    def watched_replace(source: Path, target: Path) -> None:
        assert source.parent == target.parent
        calls.append("replace")
        swap(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    store.put(entry())
    assert calls == ["sync file", "replace", "sync dir"]


def test_killed_at_any_point_a_writer_leaves_whole_entries(tmp_path: Path) -> None:
    """A process that puts entries without end is killed; what has a name is whole."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from test_store import *\n"
        "store = Store(Path(sys.argv[1]), TOWER); print('go', flush=True)\n"
        "for seed in range(100_000): store.put(entry(seed, rows=50, width=400))"
    )
    for round_ in range(3):
        command = [
            sys.executable,
            "-c",
            code,
            str(tmp_path / str(round_)),
            str(Path(__file__).parent),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"go\n"
            while len(list((tmp_path / str(round_)).rglob("*.parquet"))) < 5 + round_:
                pass
            writer.kill()
        problems = Store(tmp_path / str(round_), TOWER).verify()
        assert {problem.why for problem in problems} <= {"a temporary file that was left over"}


# ---------------------------------------------------------------- manifests

MANIFEST = Manifest(
    True,
    (
        PageRecord(1, "a" * 64, 300, 200),
        Failure(None, 2, Stage.DECODE, Reason.TRUNCATED, "cut"),
        PageRecord(3, "b" * 64, 30, 20),
    ),
)


def test_a_manifest_comes_back(store: Store) -> None:
    assert store.manifest("d" * 64, "r") is None
    store.put_manifest("d" * 64, "r", MANIFEST)
    assert store.manifest("d" * 64, "r") == MANIFEST
    assert store.manifest("d" * 64, "other") is None
    assert (store.root / "v1" / "documents" / "dd" / f"{'d' * 64}-r.json").is_file()


def test_a_manifest_that_says_the_same_is_not_written_again(store: Store) -> None:
    store.put_manifest("d" * 64, "r", MANIFEST)
    path = next(store.root.rglob("*.json"))
    before = path.stat().st_ino
    store.put_manifest("d" * 64, "r", MANIFEST)
    assert path.stat().st_ino == before
    store.put_manifest("d" * 64, "r", Manifest(False, MANIFEST.pages[:1]))
    assert store.manifest("d" * 64, "r") == Manifest(False, MANIFEST.pages[:1])


PAGE = b'{"page":%d,"pixels":"d","height_px":%d,"width_px":1}'
DAMAGED_PAGES = [b"{}", b"", PAGE % (2, 1), PAGE % (1, 0), PAGE % (1, 1) + b"," + PAGE % (1, 1)]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b"[" * 100_000, b'{"format_version":9}']
    + [b'{"format_version":1,"paged":true,"pages":[%b]}' % pages for pages in DAMAGED_PAGES],
    ids=range(6 + len(DAMAGED_PAGES)),
)
def test_a_damaged_manifest_is_a_miss_and_a_problem(tmp_path: Path, content: bytes) -> None:
    store = Store(tmp_path, TOWER)
    store.put_manifest("d" * 64, "r", MANIFEST)
    next(tmp_path.rglob("*.json")).write_bytes(content)
    assert store.manifest("d" * 64, "r") is None
    (problem,) = store.verify()
    assert problem.why.startswith("the manifest is unreadable")


def test_the_store_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, pipeline.store\n"
        "assert not {'torch', 'transformers', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
