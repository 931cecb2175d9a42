"""Raster images through Pillow: every frame of a TIFF, the first image of anything else."""

from __future__ import annotations

import io
import itertools
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import Reason, Stage
from pipeline.pages.records import Outcomes, Pixels, Refused, SourceFile, check_size

if TYPE_CHECKING:
    from PIL import Image

# Only the decoder of the announced type may look at a file.
_DECODERS = {
    "png": ["PNG"],
    "jpeg": ["JPEG"],
    "tiff": ["TIFF"],
    "webp": ["WEBP"],
    "gif": ["GIF"],
    "bmp": ["BMP"],
    "jp2": ["JPEG2000"],
    "avif": ["AVIF"],
    "heic": ["HEIF"],
}
_ORIENTATION_TAG = 0x0112
_MAX_COPIED_BYTES = 1 << 28


def image_pages(file: SourceFile, only: frozenset[int] | None) -> Outcomes:
    """The images of a file, numbered from 1; raises Refused where the file as a whole fails."""
    with _open(file, _source(file)) as image:
        if not file.paged:
            pixels = _decoded(image, file)
            if isinstance(pixels, Refused):
                raise pixels
            yield 1, pixels if only is None or 1 in only else None
            return
        for number in itertools.count(1):
            wanted = only is None or number in only
            yield number, _decoded(image, file) if wanted else None
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    image.seek(number)
            except EOFError:
                return
            except Exception as error:  # a damaged chain of directories: nothing can follow
                yield number + 1, _refusal(error)
                return


def count_frames(file: SourceFile) -> int:
    """Frames of a TIFF; raises Refused where its directories can't be followed."""
    with _open(file, file.path) as image:
        try:
            return int(getattr(image, "n_frames", 1))
        except Exception as error:  # as in `image_pages`
            raise _refusal(error) from error


def _source(file: SourceFile) -> Path | io.BytesIO:
    """What to decode a file from: libtiff maps a file into memory, so give it bytes of ours.

    A mapped file that is cut off while it is read ends the process by SIGBUS.
    """
    try:
        if file.kind == "tiff" and file.path.stat().st_size <= _MAX_COPIED_BYTES:
            return io.BytesIO(file.path.read_bytes())
    except (OSError, MemoryError) as error:
        raise _refusal(error) from error
    return file.path


def _open(file: SourceFile, source: Path | io.BytesIO) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of sizes that are checked below
            image = Image.open(source, formats=_DECODERS[file.kind])
            image.filename = ""  # with a name Pillow maps raw pixels into memory, see `_source`
            return image
    except (UnidentifiedImageError, KeyError) as error:
        reason = Reason.UNSUPPORTED if file.kind in ("heic", "avif") else Reason.CORRUPT
        raise Refused(reason, f"no decoder reads this {file.kind} file") from error
    except Exception as error:
        raise _refusal(error) from error


def _decoded(image: Image.Image, file: SourceFile) -> Pixels | Refused:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_size(*image.size)
            image.load()
            # Pillow turns a TIFF upright while loading it, and nothing else
            upright = image if file.kind == "tiff" else _upright(image)
            return np.ascontiguousarray(_rgb(upright))
    except Refused as refused:
        return refused
    except Exception as error:  # decoders raise anything on damaged data; it costs this page only
        return _refusal(error)


def _refusal(error: Exception) -> Refused:
    """What a decoder's exception means; its text only refines the reason of a refusal.

    What the machine did not give (memory, the disk's answer) is no fault of the file's.
    """
    from PIL import Image

    text = str(error) or type(error).__name__
    if isinstance(error, FileNotFoundError):
        return Refused(Reason.NOT_FOUND, "no such file", Stage.READ)
    if isinstance(error, MemoryError):
        return Refused(Reason.UNREADABLE, "not enough memory to decode it", Stage.READ)
    if isinstance(error, OSError) and error.errno is not None:
        return Refused(Reason.UNREADABLE, error.strerror or text, Stage.READ)
    if isinstance(error, Image.DecompressionBombError):
        return Refused(Reason.TOO_LARGE, text)
    if "truncated" in text.lower():
        return Refused(Reason.TRUNCATED, text)
    return Refused(Reason.CORRUPT, text)


def _upright(image: Image.Image) -> Image.Image:
    """The image turned as its EXIF orientation (1 to 8) says; unreadable EXIF data is ignored."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG)
    except Exception:  # Pillow's EXIF reader raises half a dozen types on damaged tags
        return image
    return image.transpose(turns[orientation]) if orientation in turns else image


def _rgb(image: Image.Image) -> Pixels:
    """Pixels as uint8 of shape (height, width, 3), by the rules in `RULES`."""
    if image.mode.startswith("I;16"):
        return _gray(np.asarray(image) >> 8)
    if image.mode in ("I", "F"):
        return _gray(_scaled(np.asarray(image)))
    try:
        if image.has_transparency_data:
            return _on_white(image)
        return np.asarray(image.convert("RGB"))
    except ValueError as error:
        raise Refused(Reason.UNSUPPORTED, f"colour mode {image.mode}: {error}") from error


def _gray(levels: np.ndarray) -> Pixels:
    return np.repeat(levels.astype(np.uint8)[:, :, None], 3, axis=2)


def _scaled(values: np.ndarray) -> np.ndarray:
    """Wide integers and floats to 0..255 by the smallest usual range that holds them all.

    The ranges are 0..1 (floats), 0..255 and 0..65535; beyond them, that of the values.
    """
    if not np.isfinite(values).all():
        raise Refused(Reason.CORRUPT, "it holds values that are not finite")
    low, high = min(0.0, float(values.min())), float(values.max())
    usual = [1.0, 255.0, 65535.0] if values.dtype.kind == "f" else [255.0, 65535.0]
    top = next((limit for limit in usual if low == 0.0 and high <= limit), high)
    return np.rint((values.astype(np.float64) - low) * (255.0 / ((top - low) or 1.0)))


def _on_white(image: Image.Image) -> Pixels:
    from PIL import Image

    layer = image.convert("LA") if image.mode == "La" else image
    layer = layer.convert("RGBA")
    paper = Image.new("RGBA", layer.size, (255, 255, 255, 255))
    return np.asarray(Image.alpha_composite(paper, layer).convert("RGB"))
