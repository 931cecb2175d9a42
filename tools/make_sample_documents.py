"""Draw the sample documents: `docs/` and the text of their pages, `tests/cases/docs_truth.tsv`.

    python tools/make_sample_documents.py

One PNG, one JPEG that lies on its side until its EXIF orientation is applied, one TIFF with three
pages of different sizes, one PDF with two pages, one file that is no page. The same call writes
the same bytes with the same Pillow.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent))

from render_pages import draw_lines

ROOT = Path(__file__).resolve().parents[1]
ORIENTATION_TAG = 0x0112
# The stored pixels have to be turned clockwise by 90 degrees for display.
TURN_CLOCKWISE = 6
# A PDF rendered at this resolution gives the pixels that were drawn.
PDF_DPI = 200
NOTES = """\
Sample documents for `pipeline encode docs/`.
This file is no page: the pipeline counts it as skipped.
"""


@dataclass(frozen=True, slots=True)
class Sheet:
    """One page to draw: type size and margins in px, greys in 0..255."""

    text: str
    face: str
    cell: int
    left: int
    top: int
    width: int
    height: int
    paper: int = 250
    ink: int = 20


INVOICE_TEXT = "INVOICE 2041\nDATE 12.05\nPAPER 4.20\nTOTAL 18.50"
RECEIPT_TEXT = "RECEIPT 58\nCASH 20.00\nCHANGE 1.50\nTHANK YOU"
INVOICE = Sheet(INVOICE_TEXT, "plain", 32, 40, 40, 480, 256)
RECEIPT = Sheet(RECEIPT_TEXT, "typewriter", 32, 24, 24, 448, 256, 236, 40)
LETTERS = (
    Sheet("LETTER 318\nTO: OFFICE\nWEST 14/2", "bold", 40, 48, 40, 512, 256),
    Sheet("PAGE 2\nSHIP PARCEL\nBY MAY 9", "slanted", 32, 24, 64, 448, 288, 244, 10),
    Sheet("PAGE 3\nSIGNED\nK. JONES", "narrow", 48, 32, 48, 480, 320, 252, 30),
)
REPORT = (
    Sheet("REPORT 2026\nSTOCK 35%\nZONE B-7\nWEIGHT 120", "plain", 40, 56, 48, 544, 320, 255, 0),
    Sheet("APPENDIX\nTABLE 4\nNORTH 1,204\nSOUTH 377", "bold", 32, 48, 40, 416, 320, 255, 25),
)


def draw_sheet(sheet: Sheet) -> Image.Image:
    """Grey image of a sheet, lines set 1.25 cells apart."""
    size, origin = (sheet.width, sheet.height), (sheet.left, sheet.top)
    pitch = sheet.cell * 5 // 4
    mask, _ = draw_lines(sheet.text.split("\n"), sheet.face, sheet.cell, pitch, origin, size)
    grey = sheet.paper + (sheet.ink - sheet.paper) * mask
    return Image.fromarray(np.rint(grey).astype(np.uint8))


def write_documents(out: Path) -> dict[str, tuple[Sheet, ...]]:
    """Write the files; returns the sheets of each."""
    out.mkdir(parents=True, exist_ok=True)
    draw_sheet(INVOICE).convert("RGB").save(out / "invoice.png", optimize=True)
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = TURN_CLOCKWISE
    stored = draw_sheet(RECEIPT).transpose(Image.Transpose.ROTATE_90)
    stored.convert("RGB").save(out / "receipt.jpg", quality=90, exif=exif)
    first, *others = [draw_sheet(sheet) for sheet in LETTERS]
    first.save(
        out / "letters.tif", save_all=True, append_images=others, compression="tiff_adobe_deflate"
    )
    first, *others = [draw_sheet(sheet) for sheet in REPORT]
    epoch = time.gmtime(0)
    dates = {"creationDate": epoch, "modDate": epoch}
    first.save(
        out / "report.pdf",
        save_all=True,
        append_images=others,
        resolution=PDF_DPI,
        quality=90,
        **dates,
    )
    (out / "notes.txt").write_text(NOTES, encoding="utf-8")
    return {
        "invoice.png": (INVOICE,),
        "letters.tif": LETTERS,
        "receipt.jpg": (RECEIPT,),
        "report.pdf": REPORT,
    }


def write_truth(documents: dict[str, tuple[Sheet, ...]], path: Path) -> None:
    """One line per page: file, page from 1, text with line breaks as `\\n`."""
    rows = [
        f"{name}\t{number}\t{sheet.text}".replace("\n", "\\n")
        for name, sheets in documents.items()
        for number, sheet in enumerate(sheets, start=1)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--truth", type=Path, default=ROOT / "tests" / "cases" / "docs_truth.tsv")
    args = parser.parse_args()
    write_truth(write_documents(args.out), args.truth)


if __name__ == "__main__":
    main()
