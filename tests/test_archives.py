"""Pages inside zip, tar and Parquet files: found, decoded, encoded and named without unpacking."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checkpoints import make_qwen3_vl
from test_pages import scene, simple_pdf

from pipeline.checkpoint import resolve_model
from pipeline.encode import Located, Locator, Target, encode_pages, target_for
from pipeline.errors import Failure, Reason
from pipeline.jobs import JobImage, read_job, write_job
from pipeline.keys import pixel_digest
from pipeline.pages import Page, count_pages, decode_pages, discover
from pipeline.pages.archives import MAX_MEMBER_BYTES


def png(width: int = 60) -> bytes:
    buffer = io.BytesIO()
    scene(width, 40).save(buffer, "PNG")
    return buffer.getvalue()


def members(tmp_path: Path) -> dict[str, bytes]:
    """Names as people have them, in an order of their own."""
    two = simple_pdf(tmp_path / "two.pdf", pages=2).read_bytes()
    (tmp_path / "two.pdf").unlink()
    return {
        "b 10.png": png(50),
        "b 2.png": png(70),
        "sub/ä#%?.png": png(90),
        "sub/two.pdf": two,
        "notes.txt": b"no page",
        "__MACOSX/._b 2.png": b"\x00\x05\x16\x07",
        ".hidden.png": png(),
        "../out.png": png(),
        "broken.png": b"no page either",
    }


GOOD = ["b 10.png", "b 2.png", "sub/ä#%?.png", "sub/two.pdf"]


def as_zip(path: Path, found: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in found.items():
            archive.writestr(name, data)
    return path


def as_tar(path: Path, found: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in found.items():
            member = tarfile.TarInfo(name if name.startswith(".") else f"./{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def as_parquet(path: Path, pages: list[bytes | None], **options: Any) -> Path:
    column = pa.array([None if p is None else {"bytes": p, "path": "x.png"} for p in pages])
    table = pa.table({"label": pa.array(["a"] * len(pages)), "image": column, "raw": pages})
    pq.write_table(table, path, **options)
    return path


@pytest.fixture
def target(tmp_path: Path) -> Target:
    model = resolve_model(str(make_qwen3_vl(tmp_path / "model")))
    return target_for(model, tmp_path / "cache")


def all_pages(path: Path) -> list[Page | Failure]:
    return [page for file in discover([path]).files for page in decode_pages(file)]


# ---------------------------------------------------------------- found and decoded


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a.tgz", "a.tar.xz", "a.bin"])
def test_members_are_found_in_their_order_and_decoded(tmp_path: Path, name: str) -> None:
    held = members(tmp_path)
    path = tmp_path / name
    if name.endswith((".zip", ".bin")):
        as_zip(path, held)
    else:
        as_tar(path, held, {"a.tar": "w", "a.tar.xz": "w:xz"}.get(name, "w:gz"))
    found = discover([path])
    assert [file.path for file in found.files] == [path / member for member in GOOD]
    assert found.skipped == 1
    (failure,) = found.failures
    assert (failure.file, failure.reason) == (str(path / "broken.png"), Reason.CORRUPT)
    assert [count_pages(file) for file in found.files] == [1, 1, 1, 2]
    pages = all_pages(path)
    assert [(page.file.path.name, page.page) for page in pages if isinstance(page, Page)] == [
        *(("b 10.png", 1), ("b 2.png", 1), ("ä#%?.png", 1)),
        *(("two.pdf", 1), ("two.pdf", 2)),
    ]


def test_a_member_alone_can_be_named(tmp_path: Path) -> None:
    as_zip(tmp_path / "a.zip", members(tmp_path))
    (page,) = all_pages(tmp_path / "a.zip" / "b 2.png")
    (tmp_path / "b.png").write_bytes(png(70))
    (other,) = all_pages(tmp_path / "b.png")
    assert isinstance(page, Page) and isinstance(other, Page)
    assert pixel_digest(page.rgb) == pixel_digest(other.rgb)
    (failure,) = discover([tmp_path / "a.zip" / "c.png"]).failures
    assert (failure.reason, failure.detail) == (
        Reason.NOT_FOUND,
        "the archive has no such member",
    )


def test_in_a_directory_archives_are_told_by_their_extension(tmp_path: Path) -> None:
    """A word processor's document is a zip file, too, and its pictures are no pages."""
    root = tmp_path / "scans"
    root.mkdir()
    as_zip(root / "a.ZIP", {"page.png": png()})
    as_zip(root / "letter.docx", {"media/image1.png": png()})
    as_parquet(root / "b.parquet", [png()])
    found = discover([root])
    assert [file.path for file in found.files] == [root / "a.ZIP" / "page.png"]
    assert (found.skipped, found.failures) == (2, ())


def test_rows_of_a_parquet_file(tmp_path: Path) -> None:
    path = as_parquet(tmp_path / "a.parquet", [png(50), None, png(70)], row_group_size=2)
    found = discover([path])
    rows = [f"{column}/{row}" for column in ("image", "raw") for row in (0, 2)]
    assert [file.path for file in found.files] == [path / row for row in rows]
    assert [f.file for f in found.failures] == [str(path / "image/1"), str(path / "raw/1")]
    widths = [page.rgb.shape[1] for page in all_pages(path) if isinstance(page, Page)]
    assert widths == [50, 70, 50, 70]


# ---------------------------------------------------------------- refused by name


def test_what_an_archive_cannot_give_is_a_failure_of_its_own(tmp_path: Path) -> None:
    data = bytearray(as_zip(tmp_path / "a.zip", {"a.png": png(), "b.png": png()}).read_bytes())
    data[data.index(b"b.png") + 60] ^= 255  # in its deflated bytes: the first copy of the name
    (tmp_path / "a.zip").write_bytes(data)
    found = discover([tmp_path / "a.zip"])
    assert [file.path.name for file in found.files] == ["a.png"]
    assert [(Path(f.file or "").name, f.reason) for f in found.failures] == [
        ("b.png", Reason.CORRUPT)
    ]


def test_an_encrypted_member_is_refused_by_name(tmp_path: Path) -> None:
    data = as_zip(tmp_path / "a.zip", {"a.png": png()}).read_bytes()
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = data.index(signature) + offset
        data = data[:place] + b"\x01" + data[place + 1 :]
    (tmp_path / "a.zip").write_bytes(data)
    (failure,) = discover([tmp_path / "a.zip"]).failures
    assert failure.reason is Reason.ENCRYPTED


def test_a_member_that_announces_too_many_bytes_is_not_unpacked(tmp_path: Path) -> None:
    path = as_zip(tmp_path / "a.zip", {"a.png": png()})
    data = path.read_bytes()
    place = data.index(b"PK\x01\x02") + 24
    huge = (MAX_MEMBER_BYTES + 1).to_bytes(4, "little")
    path.write_bytes(data[:place] + huge + data[place + 4 :])
    (failure,) = discover([path]).failures
    assert failure.reason is Reason.TOO_LARGE
    assert failure.detail == "1,073,741,825 bytes in the archive are above 1,073,741,824"


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "a.parquet"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_cut_archive_is_a_failure(tmp_path: Path, name: str, share: float) -> None:
    path = tmp_path / name
    if name == "a.zip":
        as_zip(path, {"a.png": png()})
    elif name == "a.parquet":
        as_parquet(path, [png()])
    else:
        as_tar(path, {"a.png": png(400)}, "w:gz")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    found = discover([path])
    assert found.failures and not found.files
    assert {failure.reason for failure in found.failures} <= {Reason.CORRUPT, Reason.TRUNCATED}


# ---------------------------------------------------------------- encoded, and in jobs


@pytest.mark.parametrize("kind", ["zip", "tar", "parquet"])
def test_a_job_refers_to_members_and_finds_their_embeddings(
    tmp_path: Path, target: Target, kind: str
) -> None:
    held = {name: data for name, data in members(tmp_path).items() if name in GOOD}
    path = tmp_path / f"scans #1.{kind}"
    if kind == "zip":
        as_zip(path, held)
    elif kind == "tar":
        as_tar(path, held)
    else:
        as_parquet(path, list(held.values()))
    report = encode_pages([path], target)
    expected = 10 if kind == "parquet" else 5  # it has two columns of the same bytes
    assert (report.pages, report.failed) == (expected, 0)
    assert encode_pages([path], target).encoded == 0

    job = tmp_path / "jobs" / "job.jsonl"
    job.parent.mkdir()
    images = (JobImage(page.path, page.page, page.paged) for page in report.good)
    write_job(job, images, inputs=[path], prompt="Read.", max_tokens=8, model_name="m")
    lines = list(read_job(job, roots=[tmp_path], attachments=tmp_path / "attachments"))
    assert not [line for line in lines if isinstance(line, Failure)], lines
    locator = Locator(target)
    for line, page in zip(lines, report.good, strict=True):
        assert not isinstance(line, Failure)
        (image,) = line.images
        found = locator.locate(image.path, image.page)
        assert isinstance(found, Located) and found.footer.key == page.key
    assert len({json.loads(line)["custom_id"] for line in job.read_text().splitlines()}) == expected


def test_an_archive_that_changes_is_read_again(tmp_path: Path, target: Target) -> None:
    path = as_zip(tmp_path / "a.zip", {"a.png": png(60)})
    assert encode_pages([path], target).encoded == 1
    as_zip(path, {"a.png": png(600)})
    assert Locator(target).locate(path / "a.png", 1) is None
    assert encode_pages([path], target).encoded == 1
