"""PDF pages through PDFium, rendered on white with forms and annotations."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import Reason, Stage
from pipeline.pages.records import Outcomes, Pixels, Refused, SourceFile, check_size
from pipeline.pages.structure import breaks_off, linearized_is_cut

if TYPE_CHECKING:
    from pypdfium2 import PdfDocument

POINTS_PER_INCH = 72

# PDFium keeps global state: two threads in it at once give errors on good files, or a crash.
_pdfium = threading.Lock()


def pdf_pages(
    file: SourceFile, dpi: int, only: frozenset[int] | None, max_ratio: float | None = None
) -> Outcomes:
    """The pages of a document, numbered from 1; raises Refused where it can't be opened."""
    with _pdfium:
        document = _open(file)
    try:
        with _pdfium:
            count = len(document)
        for number in range(1, count + 1):
            wanted = only is None or number in only
            yield number, _rendered(document, number, dpi, max_ratio) if wanted else None
    finally:
        with _pdfium:
            document.close()


def count_pdf_pages(file: SourceFile) -> int:
    """Pages of a document; raises Refused where it can't be opened."""
    with _pdfium, _open(file) as document:
        return len(document)


def _open(file: SourceFile) -> PdfDocument:
    """The document with its forms, at least one page in it.

    By PDFium's own calls: the error of `PdfDocument` is that of an earlier file where a document
    opens and has no pages.
    """
    from pypdfium2 import PdfDocument, PdfiumError, raw

    try:
        if linearized_is_cut(file.path):
            raise Refused(Reason.TRUNCATED, "the file is shorter than it says")
    except FileNotFoundError as error:
        raise Refused(Reason.NOT_FOUND, "no such file", Stage.READ) from error
    except OSError as error:
        raise Refused(Reason.UNREADABLE, error.strerror or str(error), Stage.READ) from error
    handle = raw.FPDF_LoadDocument(os.fsencode(file.path) + b"\0", None)
    if not handle:
        raise _refusal(int(raw.FPDF_GetLastError()), file)
    if raw.FPDF_GetPageCount(handle) < 1:
        raw.FPDF_CloseDocument(handle)
        raise Refused(Reason.CORRUPT, "the document has no pages")
    document = PdfDocument(handle, autoclose=True)
    # without forms the values in fields are missing; a broken form must not cost the page
    with contextlib.suppress(PdfiumError):
        document.init_forms()
    return document


def _refusal(code: int, file: SourceFile) -> Refused:
    """What PDFium's error at opening means."""
    match code:
        case 2:
            return Refused(Reason.UNREADABLE, "the file can't be read", Stage.READ)
        case 4:
            return Refused(Reason.ENCRYPTED, "the document needs a password")
        case 5:
            return Refused(Reason.ENCRYPTED, "PDFium does not know this kind of encryption")
    if breaks_off("pdf", file.path):
        return Refused(Reason.TRUNCATED, "the end of the document is missing")
    return Refused(Reason.CORRUPT, "it is damaged, or no PDF")


def _rendered(
    document: PdfDocument, number: int, dpi: int, max_ratio: float | None
) -> Pixels | Refused:
    """One page, uint8 of shape (height, width, 3)."""
    scale = dpi / POINTS_PER_INCH
    try:
        with _pdfium:
            page = document[number - 1]
            try:
                width_pt, height_pt = page.get_size()
                width_px, height_px = math.ceil(width_pt * scale), math.ceil(height_pt * scale)
                check_size(width_px, height_px, f" at {dpi} dpi", max_ratio)
                bitmap = page.render(scale=scale, rev_byteorder=True)
                rgb = np.array(bitmap.to_numpy()[:, :, :3])
                bitmap.close()
            finally:
                page.close()
            return rgb
    except Refused as refused:
        return refused
    except MemoryError:
        return Refused(Reason.UNREADABLE, "not enough memory to render it", Stage.READ)
    except Exception as error:  # PDFium on damaged data; it costs this page only
        return Refused(Reason.CORRUPT, str(error) or type(error).__name__)
