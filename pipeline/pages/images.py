"""Raster images through Pillow: every frame of a TIFF, the first image of anything else."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import re
import warnings
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from pipeline.errors import Reason, Stage
from pipeline.pages.colour import rgb_pixels, samples_of
from pipeline.pages.records import (
    MAX_TIFF_PAGES,
    Decoded,
    Outcomes,
    Pixels,
    Refused,
    SourceFile,
    Wanted,
    check_size,
    lacks_memory,
)
from pipeline.pages.structure import announced_size, breaks_off, tiff_directories
from pipeline.pages.whole import check_rows, check_scans, check_strips

if TYPE_CHECKING:
    from PIL import Image, ImageFile

# Only the decoder of the announced type may look at a file: (module, name) of each.
_DECODERS = {
    "png": ("PngImagePlugin", "PNG"),
    "jpeg": ("JpegImagePlugin", "JPEG"),
    "tiff": ("TiffImagePlugin", "TIFF"),
    "webp": ("WebPImagePlugin", "WEBP"),
    "gif": ("GifImagePlugin", "GIF"),
    "bmp": ("BmpImagePlugin", "BMP"),
    "jp2": ("Jpeg2KImagePlugin", "JPEG2000"),
    "avif": ("AvifImagePlugin", "AVIF"),
}
_ORIENTATION_TAG, _COLOUR_MAP_TAG = 0x0112, 320
_MAX_COPIED_BYTES = 1 << 28
_OPTIONAL_CODECS = ("webp", "zstd", "lzma")  # of libtiff
# What decoders say of files that may be good but are beyond them
_BEYOND = re.compile("cannot handle|unknown pixel mode|not yet supported", re.I)


def image_pages(file: SourceFile, only: Wanted | None, allow_truncated: bool = False) -> Outcomes:
    """The images of a file, numbered from 1; raises Refused where the file as a whole fails."""
    with _source(file) as stream:
        if file.kind == "tiff" and (count := _directories(stream)) > MAX_TIFF_PAGES:
            raise Refused(Reason.TOO_LARGE, f"{count:,} pages or more are above {MAX_TIFF_PAGES:,}")
        image = _opened(file, stream)
        if not file.paged:
            page = _decoded(image, file, stream, allow_truncated)
            if isinstance(page, Refused) and page.reason is not Reason.ASPECT_RATIO:
                raise page
            yield 1, page if only is None or 1 in only else None
            return
        refused: Refused | None = None
        for number in itertools.count(1):
            wanted = only is None or number in only
            yield (
                number,
                (refused or _decoded(image, file, stream, allow_truncated)) if wanted else None,
            )
            try:
                refused = _turn_to(image, number)
            except EOFError:
                return
            except Refused as broken:  # a damaged chain of directories: nothing can follow
                yield number + 1, broken
                return


def _turn_to(image: Image.Image, frame: int) -> Refused | None:
    """Go to a frame, counted from 0; a refusal if only this one is bad.

    Raises EOFError behind the last one, and Refused where the others can't be reached either.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image.seek(frame)
    except EOFError:
        raise
    except Exception as error:
        if image.tell() != frame:
            raise _refusal(error) from error
        return _refusal(error)
    return None


def count_frames(file: SourceFile) -> int:
    """Pages of a TIFF; raises Refused where it can't be read."""
    with _source(file) as stream:
        return max(1, _directories(stream))


def _directories(stream: BinaryIO) -> int:
    count = tiff_directories(stream, MAX_TIFF_PAGES)
    stream.seek(0)
    return count


def _source(file: SourceFile) -> BinaryIO:
    """What to decode a file from: libtiff maps a file into memory, so give it bytes of ours.

    A mapped file that is cut off while it is read ends the process by SIGBUS.
    """
    try:
        if file.kind == "tiff" and file.path.stat().st_size <= _MAX_COPIED_BYTES:
            return io.BytesIO(file.path.read_bytes())
        return open(file.path, "rb")
    except (OSError, MemoryError) as error:
        raise _refusal(error) from error


def _opened(file: SourceFile, stream: BinaryIO) -> ImageFile.ImageFile:
    """The file's header read, no pixels; its size is not checked yet.

    Not by `Image.open`, whose own limit of sizes is none of ours and can't be set for one call.
    """
    from PIL import Image

    if file.kind not in _DECODERS:
        raise _too_large(file) or Refused(Reason.UNSUPPORTED, f"no decoder reads {file.kind} files")
    module, name = _DECODERS[file.kind]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's plug-ins warn of what is checked here
            importlib.import_module(f"PIL.{module}")
            # without a file name Pillow does not map raw pixels into memory, see `_source`
            return Image.OPEN[name][0](stream, "")
    except Exception as error:
        refusal = _refusal(error)
        if file.kind == "avif":  # its decoder has a limit of its own, and says only that it failed
            refusal = _too_large(file) or refusal
        if refusal.reason is Reason.CORRUPT:
            refusal.detail = f"no decoder reads this {file.kind} file: {refusal.detail}"
        raise _cut(refusal, file) from error


def _cut(refusal: Refused, file: SourceFile, image: Image.Image | None = None) -> Refused:
    """The refusal, `truncated` in place of `corrupt` where the file's end is missing."""
    if refusal.reason is Reason.CORRUPT:
        with contextlib.suppress(Exception):  # a damaged file may hold anything as its lengths
            if breaks_off(file.kind, file.path) or _strips_end(image) > file.path.stat().st_size:
                refusal.reason = Reason.TRUNCATED
    return refusal


def _strips_end(image: Image.Image | None) -> int:
    """Where the last strip or tile of a TIFF page ends in its file; 0 for anything else."""
    tags = getattr(image, "tag_v2", {})
    offsets, sizes = tags.get(273, tags.get(324, ())), tags.get(279, tags.get(325, ()))
    return max(
        (int(start) + int(size) for start, size in zip(offsets, sizes, strict=False)), default=0
    )


def _too_large(file: SourceFile) -> Refused | None:
    """The refusal of an AVIF or HEIC file that announces too large a page itself."""
    try:
        check_size(*(announced_size(file.path) or (1, 1)))
    except Refused as refused:
        return refused
    except OSError as error:
        return _refusal(error)
    return None


def _decoded(
    image: Image.Image, file: SourceFile, stream: BinaryIO, allow_truncated: bool
) -> Decoded | Refused:
    """The page whole; or what is left of it, where it is cut off and that is allowed."""
    frame = image.tell()
    whole = _read(image, file, stream, strict=True)
    if isinstance(whole, Refused) and whole.reason is Reason.TRUNCATED and allow_truncated:
        part = _left_of(file, frame)
        return whole if isinstance(part, Refused) else Decoded(part, partial=True)
    return whole if isinstance(whole, Refused) else Decoded(whole)


def _left_of(file: SourceFile, frame: int) -> Pixels | Refused:
    """What Pillow makes of a cut page; its switch for that holds for the whole process."""
    from PIL import ImageFile

    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    try:
        with _source(file) as stream:
            image = _opened(file, stream)
            image.seek(frame)
            return _read(image, file, stream, strict=False)
    except Refused as refused:
        return refused
    except (OSError, EOFError) as error:
        return _refusal(error)
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def _read(
    image: Image.Image, file: SourceFile, stream: BinaryIO, *, strict: bool
) -> Pixels | Refused:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_size(*image.size)
            samples = samples_of(image)
            if file.kind == "tiff" and strict:
                check_strips(image)
            image.load()
            if file.kind in ("png", "jpeg") and strict:
                (check_rows if file.kind == "png" else check_scans)(image, stream)
            rgb = rgb_pixels(image, samples)
            # Pillow turns a TIFF upright while loading it, and nothing else
            return rgb if file.kind == "tiff" else _upright(image, rgb)
    except Refused as refused:
        return refused
    except Exception as error:  # decoders raise anything on damaged data; it costs this page only
        codec = image.info.get("compression") if file.kind == "tiff" else None
        if codec in _OPTIONAL_CODECS and not _has_codec(str(codec)):
            return Refused(Reason.UNSUPPORTED, f"libtiff was built without {codec}")
        return _cut(_refusal(error), file, image)


def _has_codec(name: str) -> bool:
    from PIL import Image

    try:
        Image.new("RGB", (1, 1)).save(io.BytesIO(), "TIFF", compression=name)
    except OSError:
        return False
    return True


def _refusal(error: Exception) -> Refused:
    """What a decoder's exception means; its text only refines the reason of a refusal.

    What the machine did not give (memory, the disk's answer) is no fault of the file's.
    """
    from PIL import Image

    text = str(error) or type(error).__name__
    unknown = error.__cause__ or error
    if isinstance(error, FileNotFoundError):
        return Refused(Reason.NOT_FOUND, "no such file", Stage.READ)
    if isinstance(error, MemoryError):
        return lacks_memory()
    if isinstance(error, OSError) and error.errno is not None:
        return Refused(Reason.UNREADABLE, error.strerror or text, Stage.READ)
    if isinstance(error, Image.DecompressionBombError):
        return Refused(Reason.TOO_LARGE, text)
    if isinstance(unknown, KeyError) and type(unknown.args[0]) is int:
        if unknown.args[0] == _COLOUR_MAP_TAG:
            return Refused(Reason.CORRUPT, "it has no colour map")
        return Refused(Reason.UNSUPPORTED, f"TIFF compression {unknown.args[0]} is not known")
    if _BEYOND.search(text):
        return Refused(Reason.UNSUPPORTED, text)
    if "truncated" in text.lower():
        return Refused(Reason.TRUNCATED, text)
    return Refused(Reason.CORRUPT, text)


def _orientation(image: Image.Image) -> int | None:
    """The EXIF orientation; unreadable EXIF data is ignored."""
    try:
        found = image.getexif().get(_ORIENTATION_TAG)
    except Exception:  # Pillow's EXIF reader raises half a dozen types on damaged tags
        return None
    return found if isinstance(found, int) else None


def _upright(image: Image.Image, rgb: Pixels) -> Pixels:
    """The pixels turned as the image's EXIF orientation (1 to 8) says; the image is closed."""
    orientation = _orientation(image)
    image.close()  # two copies of a large page are enough
    match orientation:
        case 2:
            rgb = rgb[:, ::-1]
        case 3:
            rgb = rgb[::-1, ::-1]
        case 4:
            rgb = rgb[::-1]
        case 5:
            rgb = rgb.swapaxes(0, 1)
        case 6:
            rgb = np.rot90(rgb, -1)
        case 7:
            rgb = rgb[::-1, ::-1].swapaxes(0, 1)
        case 8:
            rgb = np.rot90(rgb, 1)
    return np.ascontiguousarray(rgb)
