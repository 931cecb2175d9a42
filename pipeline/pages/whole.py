"""Is a decoded page whole? Pillow takes some files whose data end early, and fills the rest."""

from __future__ import annotations

import io
import random
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from pipeline.errors import Reason
from pipeline.pages.records import Refused
from pipeline.pages.structure import JpegScans, jpeg_scans, png_is_short

if TYPE_CHECKING:
    from PIL import Image

_BLOCK = 8  # px, the side of what a JPEG codes at once
_JUNK_BYTES = 4096


def check_strips(image: Image.Image) -> None:
    """Refuse a raw TIFF with fewer strips or tiles than its size needs: Pillow leaves them black.

    Before the page is loaded. Where libtiff decodes, Pillow has one tile, the whole image.
    """
    width, height = getattr(image, "_tile_size", image.size)
    covered = sum(
        (right - left) * (lower - upper)
        for left, upper, right, lower in (tile[1] for tile in getattr(image, "tile", ()))
    )
    if covered < width * height:
        detail = f"its strips hold {covered:,} of {width * height:,} pixels"
        raise Refused(Reason.TRUNCATED, detail)


def check_rows(image: Image.Image, stream: BinaryIO) -> None:
    """Refuse a PNG whose data end early; looked at only where a last row is black."""
    rows = np.asarray(image.crop((0, max(0, image.height - 2), image.width, image.height)))
    if rows.reshape(len(rows), -1).any(axis=1).all():
        return
    position = stream.tell()
    try:
        short = png_is_short(stream)
    finally:
        stream.seek(position)
    if short:
        raise Refused(Reason.TRUNCATED, "its data end before its last row")


def check_scans(image: Image.Image, stream: BinaryIO) -> None:
    """Refuse a JPEG that ends early with a proper end: libjpeg makes its missing blocks gray."""
    stream.seek(0)
    data = stream.read()
    scans = jpeg_scans(data)
    if scans.missing:
        raise Refused(Reason.TRUNCATED, "its scans end before the page has all its detail")
    if scans.end is not None and _ends_gray(image) and _takes_more(image, data, scans):
        raise Refused(Reason.TRUNCATED, "its data end before its last block")


def _ends_gray(image: Image.Image) -> bool:
    """True if the last block is what libjpeg puts in for one that it does not have."""
    width, height = image.size
    last = image.crop((max(0, width - _BLOCK), max(0, height - _BLOCK), width, height))
    return bool(np.isin(np.asarray(last), (127, 128)).all())


def _takes_more(image: Image.Image, data: bytes, scans: JpegScans) -> bool:
    """True if the page changes when its data go on: then they ended before it was whole."""
    from PIL import Image

    draw = random.Random(0)
    junk = bytes(draw.randrange(1, 255) for _ in range(_JUNK_BYTES))  # holds no marker
    held = data[: scans.end].rstrip(b"\xff")  # half a marker, if it was cut there
    longer = io.BytesIO(held + junk + b"\xff\xd9")
    with Image.open(longer, formats=["JPEG"]) as other:
        other.load()
        box = (0, max(0, image.height - 2 * _BLOCK), *image.size)
        ours, theirs = (np.asarray(each.crop(box)) for each in (image, other))
    return not np.array_equal(ours, theirs)
