"""An archive carries entries to another cache: whole ones only, and nothing is overwritten."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest
from makers_cache import OTHER_TOWER, TOWER, another_process, files_of, put, put_manifest

from pipeline.errors import StoreError, UsageError
from pipeline.store import Store
from pipeline.store.carry import everything, export_entries, import_entries


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A cache of five entries of two towers and one manifest."""
    root = tmp_path / "source"
    for seed in range(3):
        put(root, seed)
    for seed in range(2):
        put(root, seed, OTHER_TOWER)
    put_manifest(root)
    return root


def carry(source: Path, archive: Path) -> Path:
    export_entries(source, archive, everything(source))
    return archive


def test_what_was_exported_is_imported_byte_for_byte(source: Path, tmp_path: Path) -> None:
    sizes: list[int] = []
    out = export_entries(source, tmp_path / "out" / "a.tar", everything(source), sizes.append)
    assert (out.entries, out.manifests, out.problems) == (5, 1, [])
    assert sum(sizes) == out.bytes
    got = import_entries(tmp_path / "target", tmp_path / "out" / "a.tar")
    assert (got.entries, got.manifests, got.there, got.bytes) == (5, 1, 0, out.bytes)
    assert files_of(tmp_path / "target") == files_of(source)
    assert Store(tmp_path / "target", TOWER).verify() == []
    again = import_entries(tmp_path / "target", tmp_path / "out" / "a.tar")
    assert (again.entries, again.manifests, again.there) == (0, 0, 6)


def test_any_tar_program_reads_an_archive(source: Path, tmp_path: Path) -> None:
    archive = carry(source, tmp_path / "a.tar")
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-xf", archive, "-C", tmp_path / "out"], check=True)
    assert files_of(tmp_path / "out").keys() == files_of(source).keys() | {"contents.json"}


def test_one_tower_goes_without_the_other(source: Path, tmp_path: Path) -> None:
    out = export_entries(source, tmp_path / "a.tar", everything(source, "88"))
    assert (out.entries, out.manifests) == (2, 1)
    import_entries(tmp_path / "target", tmp_path / "a.tar")
    assert not (tmp_path / "target" / "v1" / TOWER).exists()
    for name in ("9", ""):
        with pytest.raises(UsageError, match="tower in the cache begins with"):
            everything(source, name)


def test_a_bad_entry_stays_at_home(source: Path, tmp_path: Path) -> None:
    bad = put(source, 1)
    bad.write_bytes(bad.read_bytes()[:-5])
    out = export_entries(source, tmp_path / "a.tar", everything(source))
    (problem,) = out.problems
    assert out.entries == 4 and problem.path.endswith(bad.name)


def test_an_archive_is_never_overwritten_nor_left_in_half(source: Path, tmp_path: Path) -> None:
    archive = carry(source, tmp_path / "a.tar")
    before = archive.read_bytes()
    with pytest.raises(UsageError, match="is there already"):
        carry(source, archive)
    assert archive.read_bytes() == before

    def stop(size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_entries(source, tmp_path / "b.tar", everything(source), stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "source"]


def test_an_entry_that_is_there_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    archive = carry(source, tmp_path / "a.tar")
    target = tmp_path / "target"
    here = put(target, 1)
    inode = here.stat().st_ino
    got = import_entries(target, archive)
    assert (got.entries, got.there) == (4, 1)
    assert here.stat().st_ino == inode


@pytest.mark.parametrize("place", [0.1, 0.35, 0.6, 0.8])
def test_a_flipped_byte_is_found_on_import(source: Path, tmp_path: Path, place: float) -> None:
    archive = carry(source, tmp_path / "a.tar")
    data = bytearray(archive.read_bytes())
    with tarfile.open(archive) as tar:
        entries = [each for each in tar.getmembers() if each.name.endswith(".parquet")]
    member = entries[int(len(entries) * place)]
    data[member.offset_data + member.size // 2] ^= 0x10
    archive.write_bytes(data)
    got = import_entries(tmp_path / "target", archive)
    assert Store(tmp_path / "target", TOWER).verify() == []
    assert got.entries + len(got.problems) == 5
    assert [problem.path for problem in got.problems] in ([], [member.name])


def test_a_cut_archive_is_an_error_and_goes_on_later(source: Path, tmp_path: Path) -> None:
    whole = carry(source, tmp_path / "a.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar") as tar:
        members = tar.getmembers()
    cuts = [members[2].offset, members[2].offset_data + 7, members[-1].offset, len(whole) - 1600]
    for number, length in enumerate(cuts):
        target, cut = tmp_path / f"target{number}", tmp_path / f"cut{number}.tar"
        cut.write_bytes(whole[:length])
        with pytest.raises(StoreError, match="ends early"):
            import_entries(target, cut)
        assert Store(target, TOWER).verify() == []
        assert import_entries(target, tmp_path / "a.tar").there > 0
        assert files_of(target) == files_of(source)


@pytest.mark.parametrize("content", [b"", b"no archive", b"x" * 2000])
def test_what_is_no_archive_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(StoreError) as error:
        import_entries(tmp_path / "target", tmp_path / "a.tar")
    assert "no archive of entries" in error.value.message


def member(name: str, data: bytes = b"{}", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


KEY = "ab" + "0" * 62


@pytest.mark.parametrize(
    ("info", "why"),
    [
        (member("../../escaped.json"), "no file of a cache"),
        (member("/tmp/escaped.json"), "no file of a cache"),
        (member("lock"), "no file of a cache"),
        (member(f"v1/{TOWER}/ab/{KEY}.parquet/../x"), "no file of a cache"),
        (member(f"v1/{TOWER}/cd/{KEY}.parquet"), "no file of a cache"),
        (member(f"v2/{TOWER}/ab/{KEY}.parquet"), "format version 2, expected 1"),
        (member(f"v1/{TOWER}/ab/{KEY}.parquet"), "the file is damaged"),
        (member(f"v1/documents/ab/{KEY}-0.json"), "the manifest is unreadable"),
        (member(f"v1/{TOWER}/ab/{KEY}.parquet", b"", type=tarfile.SYMTYPE, linkname="/etc"),
         "no file of a cache"),
        (member(f"v1/{TOWER}/ab/{KEY}.parquet", b"", type=tarfile.DIRTYPE), "no file of a cache"),
        (member(f"v1/{TOWER}/ab/{KEY}.parquet", b"", type=tarfile.FIFOTYPE), "no file of a cache"),
    ],
    ids=range(11),
)  # fmt: skip
def test_a_member_that_is_no_whole_file_of_a_cache_is_named_and_left_out(
    tmp_path: Path, info: tuple[tarfile.TarInfo, bytes], why: str
) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for each, data in (info, member("contents.json", b'{"entries":0,"manifests":0}')):
            tar.addfile(each, io.BytesIO(data))
    got = import_entries(tmp_path / "cache", tmp_path / "a.tar")
    (problem,) = got.problems
    assert problem.path == info[0].name and why in problem.why
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar", "cache", "lock"]


def test_a_manifest_that_is_there_and_whole_stays(source: Path, tmp_path: Path) -> None:
    archive = carry(source, tmp_path / "a.tar")
    here = put_manifest(tmp_path / "target")
    inode = here.stat().st_ino
    import_entries(tmp_path / "target", archive)
    assert here.stat().st_ino == inode
    here.write_bytes(b"{")
    import_entries(tmp_path / "target", archive)
    assert Store(tmp_path / "target", TOWER).verify() == []


def test_an_import_may_go_on_beside_other_users(source: Path, tmp_path: Path) -> None:
    archive = carry(source, tmp_path / "a.tar")
    with another_process(tmp_path / "target"):
        assert import_entries(tmp_path / "target", archive).entries == 5
