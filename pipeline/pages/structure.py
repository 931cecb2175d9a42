"""What the structure of a file tells before or besides its decoder; plain bytes, no library."""

from __future__ import annotations

import io
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_PIECE_BYTES = 1 << 20
# (first column, first row, column step, row step) of the passes of an interlaced PNG
_ADAM7 = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
_JPEG_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")  # restarts belong to the data
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_BARE_MARKERS = (0x01, 0xD8)  # without a length
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE_FRAMES = (0xC2, 0xC6, 0xCA, 0xCE)
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}


def tiff_directories(stream: BinaryIO, limit: int) -> int:
    """How many pages a TIFF's chain of directories has; counting stops above `limit`.

    A chain that loops or breaks off ends there. `stream` may stand anywhere.
    """
    stream.seek(0)
    head = stream.read(16)
    order = "<" if head[:2] == b"II" else ">"
    big = head[2:4] in (b"\x2b\x00", b"\x00\x2b")
    count_format, entry_bytes, next_format = ("Q", 20, "Q") if big else ("H", 12, "I")
    offset = _first_directory(head)
    seen: set[int] = set()
    try:
        while offset and offset not in seen and len(seen) <= limit:
            seen.add(offset)
            (entries,) = _unpack(stream, offset, order + count_format)
            after = offset + struct.calcsize(order + count_format) + entries * entry_bytes
            (offset,) = _unpack(stream, after, order + next_format)
    except (struct.error, OverflowError, ValueError, OSError):  # it ends in the middle
        pass
    return len(seen)


def _unpack(stream: BinaryIO, offset: int, form: str) -> tuple[int, ...]:
    stream.seek(offset)
    return struct.unpack(form, stream.read(struct.calcsize(form)))


def announced_size(path: Path) -> tuple[int, int] | None:
    """(width, height) in px that an AVIF or HEIC file names for its largest image."""
    with open(path, "rb") as stream:
        head = stream.read(_PIECE_BYTES)
    sizes = []
    place = head.find(b"ispe")
    while 0 <= place <= len(head) - 16:
        sizes.append(struct.unpack_from(">II", head, place + 8))
        place = head.find(b"ispe", place + 4)
    return max(sizes, key=lambda size: size[0] * size[1], default=None)


def breaks_off(kind: str, path: Path) -> bool:
    """True if a damaged file is shorter than it says itself: then its rest is missing."""
    size = path.stat().st_size
    with open(path, "rb") as stream:
        head = stream.read(1024)
        stream.seek(max(0, size - 1024))
        tail = stream.read()
        if kind == "webp":
            return len(head) < 8 or int.from_bytes(head[4:8], "little") + 8 > size
        if kind == "pdf":
            return (b" obj" in head and b"%%EOF" not in tail) or _pdf_length(head) > size
        if kind == "tiff":
            return _first_directory(head) >= size
        if kind == "jp2" and head[:4] == b"\xff\x4f\xff\x51":
            return not tail.rstrip(b"\0").endswith(b"\xff\xd9")
        return kind in ("avif", "heic", "jp2") and _boxes_break_off(stream, size)


def linearized_is_cut(path: Path) -> bool:
    """True if a PDF that is laid out for the web is shorter than it says.

    PDFium opens it all the same: its first page and the table of all objects stand in front.
    """
    with open(path, "rb") as stream:
        return _pdf_length(stream.read(1024)) > path.stat().st_size


def _pdf_length(head: bytes) -> int:
    announced = re.search(rb"/Linearized\b[^>]{,200}?/L\s+(\d{1,12})\b", head)
    return int(announced[1]) if announced else 0


def _first_directory(head: bytes) -> int:
    """Offset of a TIFF's first directory; 0 where the header itself is cut."""
    order = "<" if head[:2] == b"II" else ">"
    big = head[2:4] in (b"\x2b\x00", b"\x00\x2b")
    try:
        return int(struct.unpack_from(order + ("Q" if big else "I"), head, 8 if big else 4)[0])
    except struct.error:
        return 0


def _boxes_break_off(stream: BinaryIO, size: int) -> bool:
    """True if a chain of ISO boxes (AVIF, HEIC, JPEG 2000) reaches beyond the file's end."""
    place = 0
    while place < size:
        stream.seek(place)
        head = stream.read(16)
        if len(head) < 8:
            return True
        length = int.from_bytes(head[:4], "big")
        if length == 0:  # to the end of the file
            stream.seek(max(0, size - 2))
            return head[4:8] == b"jp2c" and stream.read() != b"\xff\xd9"
        if length == 1:
            length = int.from_bytes(head[8:16], "big")
        if length < 8:
            return False
        place += length
    return place > size


@dataclass(frozen=True, slots=True)
class JpegScans:
    """What the scans of a JPEG's first image leave out, and where the data of the last one end."""

    missing: int  # coefficients of its components that no scan brings to full precision
    end: int | None


def jpeg_scans(data: bytes) -> JpegScans:
    """Follow the markers; entropy-coded data are skipped, not decoded."""
    place, end, progressive = 2, None, False
    needed: dict[int, set[int]] = {}  # component → coefficients not yet at full precision
    while found := _JPEG_MARKER.search(data, place):
        place, kind = found.start(), data[found.start() + 1]
        if kind == _END_OF_IMAGE or place + 4 > len(data):
            break
        if kind in _BARE_MARKERS:
            place += 2
            continue
        body = data[place + 4 : place + 2 + int.from_bytes(data[place + 2 : place + 4], "big")]
        place += 4 + len(body)
        if kind in _FRAMES and len(body) >= 6:
            progressive = kind in _PROGRESSIVE_FRAMES
            needed = {component: set(range(64)) for component in body[6 : 6 + 3 * body[5] : 3]}
        elif kind == _START_OF_SCAN and len(body) >= 4:
            first, last, bits = body[-3:]
            for component in body[1 : 1 + 2 * body[0] : 2]:
                if not progressive:
                    needed.pop(component, None)
                elif bits & 15 == 0 and component in needed:
                    needed[component] -= set(range(first, last + 1))
            after = _JPEG_MARKER.search(data, place)
            place = end = after.start() if after else len(data)
    return JpegScans(sum(map(len, needed.values())), end)


def png_is_short(stream: BinaryIO) -> bool:
    """True if a PNG's compressed data hold fewer rows than its header announces.

    Pillow takes such a file and leaves the missing rows black. `stream` may stand anywhere.
    """
    stream.seek(8)
    needed, held = 0, 0
    inflate = zlib.decompressobj()
    while len(head := stream.read(8)) == 8:
        size, kind = struct.unpack(">I4s", head)
        if kind == b"IHDR":
            needed = _png_bytes(stream.read(size))
        elif kind == b"IDAT":
            piece = stream.read(size)
            while piece and held < needed and not inflate.eof:
                held += len(inflate.decompress(piece, _PIECE_BYTES))
                piece = inflate.unconsumed_tail
        else:
            stream.seek(size, io.SEEK_CUR)
        if kind == b"IEND" or held >= needed > 0 or inflate.eof:
            break
        stream.seek(4, io.SEEK_CUR)
    return held + len(inflate.flush()) < needed


def _png_bytes(header: bytes) -> int:
    """Bytes of all rows before compression: one filter byte and the samples of each."""
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header[:13])
    bits = depth * _PNG_CHANNELS.get(colour, 1)
    passes = _ADAM7 if interlaced else ((0, 0, 1, 1),)
    total = 0
    for left, top, across, down in passes:
        columns, rows = -(-(width - left) // across), -(-(height - top) // down)
        if columns > 0 and rows > 0:
            total += rows * (1 + (columns * bits + 7) // 8)
    return total
