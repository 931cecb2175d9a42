"""From Pillow's modes to RGB, by the rules in `RULES`; in bands, so that memory stays bounded."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import Reason
from pipeline.pages.records import Pixels, Refused

if TYPE_CHECKING:
    from PIL import Image

_BAND_PIXELS = 1 << 21
_WHOLE_PIXELS = 1 << 24  # up to here a second copy is cheap
_PHOTOMETRIC, _BITS, _SAMPLE_FORMAT = 262, 258, 339  # TIFF tags
_WHITE_IS_ZERO, _UNSIGNED = 0, 1
_RANGES = (1.0, 255.0, 65535.0)

Levels = NDArray[Any]
Convert = Callable[["Image.Image"], Pixels]


@dataclass(frozen=True, slots=True)
class Samples:
    """What a file says of its samples and Pillow does not apply or forgets once it is loaded."""

    white_is_zero: bool = False  # levels count from white down
    unsigned: bool = False  # 32-bit levels, which Pillow holds as signed ones
    bits: int = 16  # of a wide level: 12 or 16
    transparent: int | tuple[int, ...] | bytes | None = None  # in the units of the loaded levels


def samples_of(image: Image.Image) -> Samples:
    """To be asked before the image is loaded."""
    transparent = image.info.get("transparency")
    if image.format == "PNG":
        return Samples(transparent=_at_depth(transparent, _raw_mode(image)))
    tags = getattr(image, "tag_v2", None)
    if tags is None:
        return Samples(transparent=transparent)
    wide = image.mode in ("I", "F") or image.mode.startswith("I;16")
    return Samples(
        white_is_zero=wide and tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO,
        unsigned=image.mode == "I" and tags.get(_SAMPLE_FORMAT, (1,))[0] == _UNSIGNED,
        bits=12 if tags.get(_BITS, (1,))[0] == 12 else 16,
        transparent=transparent,
    )


def _raw_mode(image: Image.Image) -> str:
    """How the file's samples are packed, for example "L;2"."""
    tiles = getattr(image, "tile", None)
    args = tiles[0][3] if tiles else ""
    return str(args if isinstance(args, str) else args[0])


def _at_depth(transparent: Any, raw_mode: str) -> Any:
    """A PNG's transparent level, given in the file's depth, in that of the loaded levels."""
    if transparent is None or isinstance(transparent, bytes):
        return transparent
    if raw_mode in ("L;2", "L;4"):
        return transparent * {"L;2": 85, "L;4": 17}[raw_mode]
    if raw_mode == "RGB;16B":  # Pillow keeps the high bytes only; low ones can't be compared
        return tuple(level >> 8 for level in transparent)
    return transparent


def rgb_pixels(image: Image.Image, samples: Samples) -> Pixels:
    """A loaded image as uint8 of shape (height, width, 3)."""
    if samples.transparent is not None:
        image.info["transparency"] = samples.transparent
    small = image.width * image.height <= _WHOLE_PIXELS
    if small and image.mode == "RGB" and not image.has_transparency_data:
        return np.array(image)
    try:
        convert = _conversion(image, samples)
        rgb = np.empty((image.height, image.width, 3), np.uint8)
        for top, band in _bands(image):
            rgb[top : top + band.height] = convert(band)
        return rgb
    except ValueError as error:
        raise Refused(Reason.UNSUPPORTED, f"colour mode {image.mode}: {error}") from error


def _bands(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """(top row, rows from there on) of the whole image."""
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _conversion(image: Image.Image, samples: Samples) -> Convert:
    """What turns bands of this image to RGB."""
    if image.mode.startswith("I;16"):
        return lambda band: _gray(_narrowed(np.asarray(band), samples))
    if image.mode in ("I", "F"):
        low, top = _range(image, samples)
        return lambda band: _gray(_scaled(_wide(band, samples), low, top, samples))
    if image.has_transparency_data:
        return _on_white
    if image.mode == "CMYK" and (profile := image.info.get("icc_profile")):
        return _by_profile(profile)
    return lambda band: np.asarray(band.convert("RGB"))


# ---------------------------------------------------------------- depth


def _gray(levels: Levels) -> Pixels:
    return np.repeat(levels.astype(np.uint8)[:, :, None], 3, axis=2)


def _narrowed(values: Levels, samples: Samples) -> Levels:
    """Levels of 12 or 16 bits to 0..255 by their high byte; the transparent one is white."""
    levels = values >> (samples.bits - 8)
    if samples.white_is_zero:
        levels = 255 - levels
    if isinstance(samples.transparent, int):
        levels = np.where(values == samples.transparent, 255, levels)
    return levels


def _wide(band: Image.Image, samples: Samples) -> Levels:
    values = np.asarray(band)
    return values.view(np.uint32) if samples.unsigned else values


def _range(image: Image.Image, samples: Samples) -> tuple[float, float]:
    """The smallest usual range that holds all levels; beyond the usual ones, that of the levels.

    The usual ranges are 0..1 (floats), 0..255 and 0..65535.
    """
    low, high = 0.0, 0.0
    for _, band in _bands(image):
        values = _wide(band, samples)
        if not np.isfinite(values).all():
            raise Refused(Reason.CORRUPT, "it holds values that are not finite")
        low, high = min(low, float(values.min())), max(high, float(values.max()))
    usual = _RANGES if image.mode == "F" else _RANGES[1:]
    return low, next((limit for limit in usual if low == 0.0 and high <= limit), high)


def _scaled(values: Levels, low: float, top: float, samples: Samples) -> Levels:
    """Levels in low..top to 0..255."""
    levels = np.rint((values.astype(np.float64) - low) * (255.0 / ((top - low) or 1.0)))
    return 255 - levels if samples.white_is_zero else levels


# ---------------------------------------------------------------- colour


def _on_white(band: Image.Image) -> Pixels:
    from PIL import Image

    layer = band.convert("LA") if band.mode == "La" else band
    layer = layer.convert("RGBA")
    paper = Image.new("RGBA", layer.size, (255, 255, 255, 255))
    return np.asarray(Image.alpha_composite(paper, layer).convert("RGB"))


def _by_profile(profile: bytes) -> Convert:
    """CMYK by its own profile to sRGB; by plain arithmetic if the profile can't be used."""
    from PIL import ImageCms

    try:
        to_srgb = ImageCms.buildTransform(
            ImageCms.ImageCmsProfile(io.BytesIO(profile)),
            ImageCms.createProfile("sRGB"),
            "CMYK",
            "RGB",
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
            ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
    except (ImageCms.PyCMSError, OSError):  # damaged, or of another colour space
        return lambda band: np.asarray(band.convert("RGB"))

    def convert(band: Image.Image) -> Pixels:
        converted = to_srgb.apply(band)
        return np.asarray(converted)

    return convert
