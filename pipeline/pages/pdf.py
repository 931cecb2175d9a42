"""PDF pages through PDFium, rendered on white with forms and annotations."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import Reason, Stage
from pipeline.geometry import AspectRatioError, PixelBudget
from pipeline.keys import RenderSpec
from pipeline.pages.records import (
    Decoded,
    Outcomes,
    Pixels,
    Refused,
    SourceFile,
    Wanted,
    check_size,
    lacks_memory,
)
from pipeline.pages.structure import breaks_off, linearized_is_cut

if TYPE_CHECKING:
    from pypdfium2 import PdfDocument, PdfPage

POINTS_PER_INCH = 72
_NEEDS_PASSWORD = 4  # PDFium's FPDF_ERR_PASSWORD

# PDFium keeps global state: two threads in it at once give errors on good files, or a crash.
_pdfium = threading.Lock()


def pdf_pages(
    file: SourceFile, render: RenderSpec, only: Wanted | None, passwords: Sequence[str] = ()
) -> Outcomes:
    """The pages of a document, numbered from 1; raises Refused where it can't be opened."""
    with _pdfium:
        document = _open(file, render.allow_truncated, passwords)
    try:
        with _pdfium:
            count = len(document)
        for number in range(1, count + 1):
            wanted = only is None or number in only
            yield number, _rendered(document, number, render) if wanted else None
    finally:
        with _pdfium:
            document.close()


def count_pdf_pages(file: SourceFile) -> int:
    """Pages of a document; raises Refused where it can't be opened."""
    with _pdfium, _open(file) as document:
        return len(document)


def _open(
    file: SourceFile, allow_truncated: bool = True, passwords: Sequence[str] = ()
) -> PdfDocument:
    """The document with its forms, at least one page in it.

    By PDFium's own calls: the error of `PdfDocument` is that of an earlier file where a document
    opens and has no pages.
    """
    from pypdfium2 import PdfDocument, PdfiumError, raw

    try:
        if not allow_truncated and linearized_is_cut(file.path):
            raise Refused(Reason.TRUNCATED, "the file is shorter than it says")
    except FileNotFoundError as error:
        raise Refused(Reason.NOT_FOUND, "no such file", Stage.READ) from error
    except OSError as error:
        raise Refused(Reason.UNREADABLE, error.strerror or str(error), Stage.READ) from error
    for password in (None, *passwords):
        secret = None if password is None else password.encode() + b"\0"
        handle = raw.FPDF_LoadDocument(os.fsencode(file.path) + b"\0", secret)
        if handle or (code := int(raw.FPDF_GetLastError())) != _NEEDS_PASSWORD:
            break
    if not handle:
        raise _refusal(code, file, tried=len(passwords))
    if raw.FPDF_GetPageCount(handle) < 1:
        raw.FPDF_CloseDocument(handle)
        raise Refused(Reason.CORRUPT, "the document has no pages")
    document = PdfDocument(handle, autoclose=True)
    # without forms the values in fields are missing; a broken form must not cost the page
    with contextlib.suppress(PdfiumError):
        document.init_forms()
    return document


def _refusal(code: int, file: SourceFile, tried: int) -> Refused:
    """What PDFium's error at opening means."""
    match code:
        case 2:
            return Refused(Reason.UNREADABLE, "the file can't be read", Stage.READ)
        case 4 if tried:
            return Refused(Reason.ENCRYPTED, "the document needs another password")
        case 4:
            return Refused(Reason.ENCRYPTED, "the document needs a password")
        case 5:
            return Refused(Reason.ENCRYPTED, "PDFium does not know this kind of encryption")
    if breaks_off("pdf", file.path):
        return Refused(Reason.TRUNCATED, "the end of the document is missing")
    return Refused(Reason.CORRUPT, "it is damaged, or no PDF")


def _rendered(document: PdfDocument, number: int, render: RenderSpec) -> Decoded | Refused:
    """One page as its crop box and rotation show it."""
    try:
        with _pdfium:
            page = document[number - 1]
            try:
                return Decoded(_drawn(page, *_size_px(page, render)))
            finally:
                page.close()
    except Refused as refused:
        return refused
    except MemoryError:
        return lacks_memory()
    except Exception as error:  # PDFium on damaged data; it costs this page only
        return Refused(Reason.CORRUPT, str(error) or type(error).__name__)


def _size_px(page: PdfPage, render: RenderSpec) -> tuple[int, int]:
    """(height, width) to draw a page at: of its dpi; or the model's, where that is one resize."""
    scale = render.dpi / POINTS_PER_INCH
    width_px, height_px = (math.ceil(side_pt * scale) for side_pt in page.get_size())
    check_size(width_px, height_px, f" at {render.dpi} dpi")
    if not isinstance(render.geometry, PixelBudget):  # tiles and canvases: the processor cuts them
        return height_px, width_px
    try:
        placed = render.geometry.place(height_px, width_px)
        again = render.geometry.place(placed.height_px, placed.width_px)
    except AspectRatioError:
        return height_px, width_px
    same = (again.height_px, again.width_px) == (placed.height_px, placed.width_px)
    return (placed.height_px, placed.width_px) if same else (height_px, width_px)


def _drawn(page: PdfPage, height_px: int, width_px: int) -> Pixels:
    """The page on white at exactly this size, uint8 of shape (height, width, 3)."""
    from pypdfium2 import PdfBitmap, raw

    bitmap = PdfBitmap.new_native(width_px, height_px, raw.FPDFBitmap_BGR, rev_byteorder=True)
    try:
        bitmap.fill_rect((255, 255, 255, 255), 0, 0, width_px, height_px)
        place = (0, 0, width_px, height_px, 0, raw.FPDF_ANNOT | raw.FPDF_REVERSE_BYTE_ORDER)
        raw.FPDF_RenderPageBitmap(bitmap, page, *place)
        if page.formenv is not None:
            raw.FPDF_FFLDraw(page.formenv, bitmap, page, *place)
        return np.array(bitmap.to_numpy())
    finally:
        bitmap.close()
