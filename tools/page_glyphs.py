"""Typefaces made from the two fonts that Pillow itself carries.

Aileron (CC0) is the outline font behind `ImageFont.load_default(size)`; the bitmap font behind
`ImageFont.load_default_imagefont()` looks like a typewriter. The rest are transforms of Aileron,
so drawing pages needs no font files.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

TYPEFACES = ("plain", "bold", "slanted", "narrow", "typewriter")


@lru_cache(maxsize=65536)
def glyph(face: str, cell: int, character: str) -> np.ndarray:
    """Ink coverage of one character: (cell, cell) float32 in 0..1."""
    image = (
        _typewriter(cell, character) if face == "typewriter" else _outline(face, cell, character)
    )
    return np.asarray(image, np.float32) / 255


def _outline(face: str, cell: int, character: str) -> Image.Image:
    font = ImageFont.load_default(cell * 0.92)
    image = Image.new("L", (cell, cell))
    # Centred by its advance, on a common baseline.
    x = (cell - font.getlength(character)) / 2
    width = max(1, cell // 22) if face == "bold" else 0
    ImageDraw.Draw(image).text(
        (x, cell * 0.82), character, 255, font, anchor="ls", stroke_width=width
    )
    if face == "slanted":
        shear = 0.22
        return image.transform(
            image.size,
            Image.Transform.AFFINE,
            (1, shear, -shear * cell / 2, 0, 1, 0),
            Image.Resampling.BICUBIC,
        )
    if face == "narrow":
        squeeze = 1.35
        return image.transform(
            image.size,
            Image.Transform.AFFINE,
            (squeeze, 0, (1 - squeeze) * cell / 2, 0, 1, 0),
            Image.Resampling.BICUBIC,
        )
    return image


def _typewriter(cell: int, character: str) -> Image.Image:
    font = ImageFont.load_default_imagefont()
    source = Image.new("L", (6, 11))
    ImageDraw.Draw(source).text((0, 0), character, 255, font)
    width = round(cell * 0.62)
    scaled = source.resize((width, cell), Image.Resampling.BICUBIC)
    image = Image.new("L", (cell, cell))
    image.paste(scaled, ((cell - width) // 2, 0))
    return image
