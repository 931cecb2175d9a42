"""Small page files with exact contents, written byte by byte where Pillow can't write them."""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

# ---------------------------------------------------------------- PNG

Chunk = tuple[bytes, bytes]
# (first column, first row, column step, row step) of each pass
ADAM7 = (
    *((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4)),
    *((1, 0, 2, 2), (0, 1, 1, 2)),
)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    samples: np.ndarray,
    depth: int,
    colour: int,
    *,
    interlaced: bool = False,
    chunks: Sequence[Chunk] = (),
    share: float = 1,
) -> bytes:
    """A PNG of samples (height, width, channels) of `depth` bits; `share`: of the data."""
    height, width, _ = samples.shape
    passes = ADAM7 if interlaced else ((0, 0, 1, 1),)
    data = b""
    for left, top, across, down in passes:
        part = samples[top::down, left::across]
        if part.size:
            data += b"".join(b"\0" + packed(row.ravel(), depth) for row in part)
    data = data[: int(len(data) * share)]
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, int(interlaced))
    body = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in body)


def packed(values: np.ndarray, depth: int) -> bytes:
    """A row of samples, the first in the highest bits, filled up to whole bytes."""
    if depth == 16:
        return values.astype(">u2").tobytes()
    bits = (values[:, None].astype(np.uint8) >> np.arange(depth - 1, -1, -1)) & 1
    return np.packbits(bits.astype(np.uint8)).tobytes()


# ---------------------------------------------------------------- TIFF


def packed_12(values: np.ndarray) -> bytes:
    """A row of samples of 12 bits, two in three bytes."""
    digits = "".join(f"{int(value):03x}" for value in values)
    return bytes.fromhex(digits + "0" * (len(digits) % 2))


def tiff(
    pages: Sequence[tuple[dict[int, Sequence[int]], Sequence[bytes]]],
    *,
    order: str = "<",
    loop_to: int | None = None,
    tiled: bool = False,
) -> bytes:
    """A TIFF of pages (tags, strips); directories stand first, then all the strips.

    Strip offsets and sizes are filled in. `loop_to`: the last directory points to that page.
    """
    offsets_tag, sizes_tag = (324, 325) if tiled else (273, 279)
    directories = [
        {**tags, offsets_tag: [0] * len(strips), sizes_tag: [len(strip) for strip in strips]}
        for tags, strips in pages
    ]
    places, place = [], 8
    for tags in directories:
        places.append(place)
        place += 6 + 12 * len(tags) + sum(_far(values) for values in tags.values())
    data = b""
    for tags, (_, strips) in zip(directories, pages, strict=True):
        tags[offsets_tag] = [
            place + len(data) + sum(map(len, strips[:i])) for i in range(len(strips))
        ]
        data += b"".join(strips)
    follow = [*places[1:], 0 if loop_to is None else places[loop_to]]
    body = (b"II\x2a\0" if order == "<" else b"MM\0\x2a") + struct.pack(order + "I", 8)
    for tags, at, after in zip(directories, places, follow, strict=True):
        body += _directory(tags, at, after, order)
    return body + data


def _far(values: Sequence[int]) -> int:
    if isinstance(values, bytes):
        return len(values) + len(values) % 2
    return 4 * len(values) if len(values) > 1 else 0


def _directory(tags: dict[int, Sequence[int]], at: int, after: int, order: str) -> bytes:
    entries, far = struct.pack(order + "H", len(tags)), b""
    end = at + 6 + 12 * len(tags)
    for tag in sorted(tags):
        values = tags[tag]
        if isinstance(values, bytes):  # of more than four bytes
            entries += struct.pack(order + "HHII", tag, 7, len(values), end + len(far))
            far += values + b"\0" * (len(values) % 2)
            continue
        packed = struct.pack(f"{order}{len(values)}I", *values)
        if len(values) > 1:
            far, packed = far + packed, struct.pack(order + "I", end + len(far))
        entries += struct.pack(order + "HHI", tag, 4, len(values)) + packed
    return entries + struct.pack(order + "I", after) + far


def gray_tags(
    width: int, height: int, bits: int = 8, **more: Sequence[int]
) -> dict[int, Sequence[int]]:
    """Tags of a gray page in one uncompressed strip; `more` by `_TAGS`."""
    tags: dict[int, Sequence[int]] = {
        256: [width], 257: [height], 258: [bits], 259: [1], 262: [1], 277: [1], 278: [height]
    }  # fmt: skip
    names = {"compression": 259, "photometric": 262, "format": 339, "orientation": 274}
    return tags | {names[name]: values for name, values in more.items()}


def strips_of(image: Image.Image, compression: str) -> tuple[dict[int, Sequence[int]], list[bytes]]:
    """(tags, strips) of a page as Pillow and libtiff write it, to be laid out anew."""
    written = io.BytesIO()
    image.save(written, "TIFF", compression=compression)
    with Image.open(written) as page:
        tags = page.tag_v2
        spots = list(zip(tags[273], tags[279], strict=True))
        kept = {}
        for tag in (256, 257, 258, 259, 262, 277, 278, 284, 292, 293, 317, 339, 347, 530):
            if tag in tags:
                value = tags[tag]
                kept[tag] = value if isinstance(value, tuple | bytes) else [int(value)]
    data = written.getvalue()
    return kept, [data[start : start + size] for start, size in spots]


# ---------------------------------------------------------------- JPEG


def without_adobe(jpeg: bytes) -> bytes:
    """A JPEG without its APP14 segment."""
    place = jpeg.index(b"\xff\xee")
    size = int.from_bytes(jpeg[place + 2 : place + 4], "big")
    return jpeg[:place] + jpeg[place + 2 + size :]


def as_ycck(cmyk: Image.Image, quality: int = 95) -> bytes:
    """A YCCK JPEG (Adobe transform 2) of a CMYK image, coded without chroma subsampling.

    The bytes are those of a four-channel JPEG whose first three channels are YCbCr of the
    inverted ink, as Photoshop writes them.
    """
    inverted = 255 - np.asarray(cmyk).astype(int)  # Adobe keeps ink inverted
    rgb = Image.fromarray((255 - inverted[:, :, :3]).astype(np.uint8))
    luma = np.asarray(rgb.convert("YCbCr"))
    planes = np.dstack([luma, inverted[:, :, 3].astype(np.uint8)])
    out = io.BytesIO()
    # Pillow inverts what it writes as CMYK; undo that beforehand
    Image.fromarray(255 - planes, "CMYK").save(out, "JPEG", quality=quality, subsampling=0)
    data = out.getvalue()
    place = data.index(b"\xff\xee")
    assert data[place + 4 : place + 9] == b"Adobe"
    return data[: place + 15] + b"\x02" + data[place + 16 :]


# ---------------------------------------------------------------- ICC


def cmyk_profile(colours: dict[tuple[int, int, int, int], tuple[int, int, int]]) -> bytes:
    """A CMYK output profile with a two-point table: corner (0 or 1 each) → 8-bit Lab."""
    table = b""
    for corner in np.ndindex(2, 2, 2, 2):
        table += bytes(colours.get(tuple(map(int, corner)), (0, 128, 128)))  # type: ignore[call-overload]
    unit = struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 65536)
    ramp = bytes(range(256))
    lut = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + unit + ramp * 4 + table + ramp * 3
    white = b"XYZ \0\0\0\0" + struct.pack(">3i", 63190, 65536, 54061)
    text = b"text\0\0\0\0test\0"
    name = b"desc\0\0\0\0" + struct.pack(">I", 5) + b"test\0" + b"\0" * 78
    tags = {b"A2B0": lut, b"A2B1": lut, b"wtpt": white, b"cprt": text, b"desc": name}
    place, directory, data = 132 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    for kind, value in tags.items():
        value += b"\0" * (-len(value) % 4)
        directory += kind + struct.pack(">II", place + len(data), len(value))
        data += value
    size = place + len(data)
    head = struct.pack(">I4sI4s4s4s", size, b"\0\0\0\0", 0x02400000, b"prtr", b"CMYK", b"Lab ")
    head += struct.pack(">6H", 2026, 1, 1, 0, 0, 0) + b"acsp" + b"\0" * 28
    head += struct.pack(">3i", 63190, 65536, 54061)
    return head.ljust(128, b"\0") + directory + data


# ---------------------------------------------------------------- PDF


def pdf(objects: Sequence[bytes], trailer: bytes = b"") -> bytes:
    """A PDF of these objects, numbered from 1; the first is the catalogue."""
    body, places = b"%PDF-1.4\n", []
    for number, text in enumerate(objects, start=1):
        places.append(len(body))
        body += b"%d 0 obj %b endobj\n" % (number, text)
    start = len(body)
    body += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    body += b"".join(b"%010d 00000 n \n" % place for place in places)
    body += b"trailer << /Root 1 0 R /Size %d %b >>\n" % (len(objects) + 1, trailer)
    return body + b"startxref\n%d\n%%%%EOF\n" % start


def pdf_stream(content: bytes) -> bytes:
    return b"<< /Length %d >> stream\n%b\nendstream" % (len(content), content)


def one_page_pdf(page: bytes = b"/MediaBox [0 0 144 72] ", content: bytes = b"") -> bytes:
    """A PDF of one page with these entries and this content."""
    return pdf(
        [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            b"<< /Type /Page /Parent 2 0 R " + page + b"/Contents 4 0 R >>",
            pdf_stream(content),
        ]
    )


PASSWORD_PAD = bytes.fromhex("28BF4E5E4E758A4164004E56FFFA01082E2E00B6D0683E802F0CA9FE6453697A")


def encrypted_pdf(user: bytes, content: bytes = b"0 g 0 0 40 40 re f") -> bytes:
    """A PDF under a 40-bit RC4 user password; an empty one opens by itself."""
    padded = (user + PASSWORD_PAD)[:32]
    owner_key = hashlib.md5((b"owner" + PASSWORD_PAD)[:32]).digest()[:5]
    owner = rc4(owner_key, padded)
    permissions, identity = struct.pack("<i", -4), b"0123456789abcdef"
    key = hashlib.md5(padded + owner + permissions + identity).digest()[:5]
    check = rc4(key, PASSWORD_PAD)
    object_key = hashlib.md5(key + b"\4\0\0\0\0").digest()[:10]
    encrypt = (
        b"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <%b> /U <%b> >> /ID [<%b> <%b>]"
        % (
            owner.hex().encode(),
            check.hex().encode(),
            *[identity.hex().encode()] * 2,
        )
    )
    return pdf(
        [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 144 72] /Contents 4 0 R >>",
            pdf_stream(rc4(object_key, content)),
        ],
        encrypt,
    )


def rc4(key: bytes, data: bytes) -> bytes:
    state, j = list(range(256)), 0
    for i in range(256):
        j = (j + state[i] + key[i % len(key)]) % 256
        state[i], state[j] = state[j], state[i]
    out, i, j = bytearray(), 0, 0
    for byte in data:
        i = (i + 1) % 256
        j = (j + state[i]) % 256
        state[i], state[j] = state[j], state[i]
        out.append(byte ^ state[(state[i] + state[j]) % 256])
    return bytes(out)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
