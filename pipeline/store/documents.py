"""Document manifests: which pages a file holds, so that a rerun neither decodes nor renders."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pipeline.errors import Failure, Reason, Stage
from pipeline.keys import canonical_json

MANIFEST_VERSION = 1
DAMAGE = (ValueError, KeyError, TypeError, AssertionError, RecursionError)  # from `from_json`


@dataclass(frozen=True, slots=True)
class PageRecord:
    """A decoded page: its number from 1, pixel digest and decoded size.

    `partial` if the file is cut off and the page is what is left of it.
    """

    page: int
    pixels: str
    height_px: int
    width_px: int
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Manifest:
    """The pages of one file in order; a page that can't be decoded stands as its failure.

    `paged` tells that the file can hold several pages. Failures name no file: the same bytes may
    lie under several names.
    """

    paged: bool
    pages: tuple[PageRecord | Failure, ...]


def to_json(manifest: Manifest) -> bytes:
    """The manifest's file content."""
    return canonical_json(
        {
            "format_version": MANIFEST_VERSION,
            "paged": manifest.paged,
            "pages": [_page_to_record(page) for page in manifest.pages],
        }
    )


def from_json(data: bytes) -> Manifest:
    """The manifest in a file's content; raises one of `DAMAGE`."""
    record = json.loads(data)
    if record["format_version"] != MANIFEST_VERSION:
        raise ValueError(f"format version {record['format_version']}")
    pages = tuple(_page_of(page) for page in record["pages"])
    if not pages or [page.page for page in pages] not in ([None], list(range(1, len(pages) + 1))):
        raise ValueError("its pages are not in order")
    return Manifest(bool(record["paged"]), pages)


def _page_to_record(page: PageRecord | Failure) -> dict[str, Any]:
    if isinstance(page, Failure):
        return {
            "page": page.page,
            "stage": page.stage.value,
            "reason": page.reason.value,
            "detail": page.detail,
        }
    return {
        "page": page.page,
        "pixels": page.pixels,
        "height_px": page.height_px,
        "width_px": page.width_px,
    } | ({"partial": True} if page.partial else {})


def _page_of(record: dict[str, Any]) -> PageRecord | Failure:
    if "reason" in record:
        stage, reason = Stage(record["stage"]), Reason(record["reason"])
        return Failure(None, record["page"], stage, reason, record["detail"])
    height_px, width_px = int(record["height_px"]), int(record["width_px"])
    if not isinstance(record["pixels"], str) or min(height_px, width_px) < 1:
        raise ValueError(f"page {record['page']} can't be such a page")
    partial = bool(record.get("partial", False))
    return PageRecord(int(record["page"]), record["pixels"], height_px, width_px, partial)
