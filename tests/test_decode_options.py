"""Options of decoding: PDF pages at the model's size or a dpi, passwords, ranges, cut files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import makers_pages as make
import numpy as np
import pytest
from checkpoints import make_qwen3_vl
from click.testing import CliRunner, Result
from test_pages import scene, simple_pdf

from pipeline.checkpoint import resolve_model
from pipeline.cli import main
from pipeline.encode import DecodeOptions, Located, Locator, Target, encode_pages, target_for
from pipeline.errors import Failure, Reason
from pipeline.geometry import FixedSize, PixelBudget
from pipeline.jobs import Request
from pipeline.jobs import Result as EngineResult
from pipeline.keys import RenderSpec
from pipeline.pages import RULES, Page, PageRanges, SourceFile, decode_pages
from pipeline.run.outcome import outcome_of

CASES = Path(__file__).parent / "cases"
BUDGET = PixelBudget(16, 2, 1024, 262_144)


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def listed(*words: object) -> list[dict[str, Any]]:
    result = run("pages", *words, "--json", "--model", CASES / "qwen3_vl")
    pages: list[dict[str, Any]] = json.loads(result.stdout)["pages"]
    return pages


def drawn(path: Path, render: RenderSpec) -> np.ndarray:
    (page,) = decode_pages(SourceFile(path, "pdf"), render)
    assert isinstance(page, Page), page
    return page.rgb


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_qwen3_vl(tmp_path / "model")


def target(checkpoint: Path, cache: Path, **options: Any) -> Target:
    return target_for(resolve_model(str(checkpoint)), cache, decode=DecodeOptions(**options))


# ---------------------------------------------------------------- at the model's size


def test_a_pdf_page_is_drawn_at_the_size_that_the_model_sees(tmp_path: Path) -> None:
    path = simple_pdf(tmp_path / "a.pdf", media="0 0 612 792")
    (page,) = listed(path)
    assert (page["width_px"], page["height_px"]) == (
        page["model_width_px"],
        page["model_height_px"],
    )
    (page,) = listed(path, "--dpi", 100)
    assert (page["width_px"], page["height_px"]) == (850, 1100)
    (small,) = listed(path, "--max-pixels", 262_144)
    assert (small["width_px"], small["height_px"]) == (448, 576)
    (reduced,) = listed(path, "--max-pixels", 262_144, "--dpi", 200)
    assert (reduced["model_width_px"], reduced["model_height_px"]) == (448, 576)


def test_no_render_then_shrink(tmp_path: Path) -> None:
    """Thin lines stay as black as the renderer draws them; a reduced page has them gray."""
    lines = b" ".join(b"0 %d 300 1 re f" % y for y in range(0, 300, 7))
    path = tmp_path / "a.pdf"
    make.write(path, make.one_page_pdf(b"/MediaBox [0 0 300 300] ", b"0 g " + lines))
    at_size = drawn(path, RenderSpec(RULES, 200, BUDGET))
    assert at_size.shape == (512, 512, 3)
    placed = BUDGET.place(834, 834)
    assert (placed.height_px, placed.width_px) == (512, 512)
    at_dpi = drawn(path, RenderSpec(RULES, 200))
    assert at_dpi.shape == (834, 834, 3)


def test_pages_that_a_model_cuts_into_tiles_are_drawn_at_the_dpi(tmp_path: Path) -> None:
    path = simple_pdf(tmp_path / "a.pdf", media="0 0 288 144")
    fixed = FixedSize(336, 576, "crop", 336)
    assert drawn(path, RenderSpec(RULES, 72, fixed)).shape == (144, 288, 3)


def test_a_page_of_absurd_size_is_refused_before_it_is_drawn(tmp_path: Path) -> None:
    path = simple_pdf(tmp_path / "a.pdf", media="0 0 14400 14400")
    (failure,) = decode_pages(SourceFile(path, "pdf"), RenderSpec(RULES, 200, BUDGET))
    assert isinstance(failure, Failure) and failure.reason is Reason.TOO_LARGE
    assert failure.detail == "40000 x 40000 px at 200 dpi is above 100,000,000 pixels"


def test_images_are_not_decoded_again_for_another_dpi(tmp_path: Path, checkpoint: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    scene().save(docs / "a.png")
    simple_pdf(docs / "b.pdf", media="0 0 100 100")
    first = encode_pages([docs], target(checkpoint, tmp_path / "cache"))
    assert (first.encoded, first.cached) == (2, 0)
    again = encode_pages([docs], target(checkpoint, tmp_path / "cache", dpi=150))
    assert (again.encoded, again.cached) == (1, 1)
    manifests = list((tmp_path / "cache" / "v1" / "documents").rglob("*.json"))
    assert len(manifests) == 3  # one of the image, two of the document


# ---------------------------------------------------------------- passwords


def test_passwords_open_what_they_belong_to(tmp_path: Path) -> None:
    make.write(tmp_path / "a.pdf", make.encrypted_pdf(b"secret"))
    make.write(tmp_path / "b.pdf", make.encrypted_pdf(b"other"))
    words = (tmp_path / "a.pdf", tmp_path / "b.pdf")
    assert [page["reason"] for page in listed(*words)] == ["encrypted", "encrypted"]
    found = listed(*words, "--password", "secret")
    assert [page["reason"] for page in found] == [None, "encrypted"]
    assert found[1]["detail"] == "the document needs another password"
    found = listed(*words, "--password", "secret", "--password", "other")
    assert [page["reason"] for page in found] == [None, None]


def test_a_password_is_taken_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make.write(tmp_path / "a.pdf", make.encrypted_pdf(b"secret"))
    monkeypatch.setenv("PIPELINE_PASSWORD", "secret")
    assert [page["reason"] for page in listed(tmp_path / "a.pdf")] == [None]


def test_a_password_helps_after_a_call_without_it(tmp_path: Path, checkpoint: Path) -> None:
    """That a document needs one is not kept: it is no fault of the file's."""
    path = make.write(tmp_path / "a.pdf", make.encrypted_pdf(b"secret"))
    cache = tmp_path / "cache"
    (failure,) = encode_pages([path], target(checkpoint, cache)).failures
    assert failure.reason is Reason.ENCRYPTED
    opened = target(checkpoint, cache, passwords=("secret",))
    assert encode_pages([path], opened).encoded == 1
    # a password decides no bytes: what was encoded with one is found without
    assert encode_pages([path], target(checkpoint, cache)).cached == 1


# ---------------------------------------------------------------- ranges


def test_ranges_choose_pages_of_each_document(tmp_path: Path) -> None:
    simple_pdf(tmp_path / "a.pdf", pages=6)
    simple_pdf(tmp_path / "b.pdf", pages=2)
    words = (tmp_path / "a.pdf", tmp_path / "b.pdf", "--pages", "2,4-")
    found = [(Path(page["file"]).name, page["page"]) for page in listed(*words)]
    assert found == [("a.pdf", 2), ("a.pdf", 4), ("a.pdf", 5), ("a.pdf", 6), ("b.pdf", 2)]


@pytest.mark.parametrize("text", ["", "0", "3-2", "a", "1,,2", "-3", "1--2"])
def test_what_is_no_range_is_a_usage_error(tmp_path: Path, text: str) -> None:
    result = run("pages", tmp_path, "--pages", text)
    assert result.exit_code == 2 and "1-3,7,9-" in result.output


def test_ranges_encode_only_what_they_name(tmp_path: Path, checkpoint: Path) -> None:
    path = simple_pdf(tmp_path / "a.pdf", pages=5, media="0 0 100 100")
    cache = tmp_path / "cache"
    some = target(checkpoint, cache, pages=PageRanges(((2, 3),)))
    report = encode_pages([path], some)
    assert [page.page for page in report.good] == [2, 3]
    assert encode_pages([path], some).encoded == 0
    whole = encode_pages([path], target(checkpoint, cache))
    assert [page.page for page in whole.good] == [1, 2, 3, 4, 5]
    assert [page.page for page in encode_pages([path], some).good] == [2, 3]  # from the manifest


# ---------------------------------------------------------------- cut files


def test_what_is_left_of_a_page_is_marked_in_listing_and_result(
    tmp_path: Path, checkpoint: Path
) -> None:
    scene(320, 240).save(tmp_path / "whole.png")
    data = (tmp_path / "whole.png").read_bytes()
    path = make.write(tmp_path / "cut.png", data[: len(data) // 2])
    assert [page["reason"] for page in listed(path)] == ["truncated"]
    (page,) = listed(path, "--allow-truncated")
    assert page["reason"] is None and page["partial"] is True
    text = run("pages", path, "--allow-truncated", "--model", CASES / "qwen3_vl").stdout
    assert text.splitlines()[0].endswith("tokens, cut off")

    cache = tmp_path / "cache"
    assert encode_pages([path], target(checkpoint, cache)).failed == 1
    allowing = target(checkpoint, cache, allow_truncated=True)
    assert encode_pages([path], allowing).encoded == 1
    assert encode_pages([path], allowing).cached == 1
    found = Locator(allowing).locate(path, 1)
    assert isinstance(found, Located) and found.partial
    refused = Locator(target(checkpoint, cache)).locate(path, 1)
    assert isinstance(refused, Failure) and refused.reason is Reason.TRUNCATED


@pytest.mark.parametrize("partial", [False, True])
def test_a_result_says_that_a_page_was_cut_off(partial: bool) -> None:
    request = Request("a", "/v1/chat/completions", {}, "i" * 64, (), (), 0, partial)
    body = {"choices": [{"finish_reason": "stop"}]}
    line = outcome_of(EngineResult("a", 200, "r", body, None), request, 1)
    assert isinstance(line, dict)
    assert line["pipeline"]["flags"] == (["partial_page"] if partial else [])
