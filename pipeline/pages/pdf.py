"""PDF pages through PDFium, rendered on white with forms and annotations."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import Reason, Stage
from pipeline.pages.records import Outcomes, Pixels, Refused, SourceFile, check_size
from pipeline.pages.structure import breaks_off, linearized_is_cut

if TYPE_CHECKING:
    from pypdfium2 import PdfDocument

POINTS_PER_INCH = 72
_FILE_ERROR, _PASSWORD_ERROR, _SECURITY_ERROR = 2, 4, 5  # FPDF_ERR_FILE and so on

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
        if count < 1:
            raise Refused(Reason.CORRUPT, "the document has no pages")
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
    from pypdfium2 import PdfDocument, PdfiumError

    try:
        if linearized_is_cut(file.path):
            raise Refused(Reason.TRUNCATED, "the file is shorter than it says")
        document = PdfDocument(file.path)
    except FileNotFoundError as error:
        raise Refused(Reason.NOT_FOUND, "no such file", Stage.READ) from error
    except OSError as error:
        raise Refused(Reason.UNREADABLE, error.strerror or str(error), Stage.READ) from error
    except PdfiumError as error:
        if getattr(error, "err_code", None) == _FILE_ERROR:
            raise Refused(Reason.UNREADABLE, str(error), Stage.READ) from error
        raise Refused(_reason(error, file), str(error)) from error
    # without forms the values in fields are missing; a broken form must not cost the page
    with contextlib.suppress(PdfiumError):
        document.init_forms()
    return document


def _reason(error: Exception, file: SourceFile) -> Reason:
    if getattr(error, "err_code", None) in (_PASSWORD_ERROR, _SECURITY_ERROR):
        return Reason.ENCRYPTED
    return Reason.TRUNCATED if breaks_off("pdf", file.path) else Reason.CORRUPT


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
