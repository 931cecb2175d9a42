"""What a cached embedding is found by, and what proves that it is whole.

Two hashes: the key (of the inputs) finds an entry, the payload digest (of the stored bytes)
verifies it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pipeline.geometry import Geometry, Grid

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KEY_VERSION = 1
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DecodeRules:
    """How a file becomes RGB pixels; each value names one rule of `pipeline.pages`.

    A rule that changes gets a new name, so that pages decoded by the old one are never served.
    """

    orientation: str
    alpha: str
    depth: str
    colour: str
    frames: str
    pdf: str
    limits: str


@dataclass(frozen=True, slots=True)
class RenderSpec:
    """All that a page's pixels depend on besides the file's bytes.

    A PDF page is rendered at `dpi`; or with `geometry`, at the size that a model with it makes of
    the page. `allow_truncated` lets a page of a cut file be what is left of it.
    """

    rules: DecodeRules
    dpi: int
    geometry: Geometry | None = None
    allow_truncated: bool = False

    @functools.cache  # noqa: B019 - few specs, each asked for once per file
    def digest(self, kind: str) -> str:
        """16 hex digits; part of the name of a manifest of files of this `kind`.

        What only a PDF depends on counts for a PDF only.
        """
        parts = asdict(self)
        if kind != "pdf":
            del parts["dpi"], parts["geometry"]
        return hashlib.sha256(canonical_json(parts)).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class EncodeSpec:
    """All that an embedding's bytes depend on besides the pixels and the tower.

    `contract` is raised when the golden pixel table of `processor` changes; library versions are
    recorded in the entry and never part of the key. The resolution at which a PDF is rendered is
    no field: it is in the pixels, and so in their digest.
    """

    family: str
    processor: str
    contract: int
    geometry: Geometry
    resample: str
    rescale_factor: float
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    precision: str
    dtype: str
    rules: DecodeRules


def canonical_json(obj: Any) -> bytes:
    """One spelling per value: sorted keys, no spaces, UTF-8; NaN and infinity are refused."""
    text = json.dumps(
        obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode("utf-8")


def pixel_digest(rgb: NDArray[np.uint8]) -> str:
    """blake3 (64 hex) of a page's pixels, uint8 of shape (height, width, 3), with their shape."""
    import numpy as np
    from blake3 import blake3

    height, width, channels = rgb.shape
    assert channels == 3 and rgb.dtype == np.uint8, (rgb.shape, rgb.dtype)
    digest = blake3(f"RGB {width} {height}\n".encode())
    digest.update(np.ascontiguousarray(rgb).data.cast("B"))
    return digest.hexdigest()


def text_digest(text: bytes) -> str:
    """blake3 (64 hex) of a short text."""
    from blake3 import blake3

    return str(blake3(text).hexdigest())


def file_digest(path: Path) -> str:
    """blake3 (64 hex) of a file's bytes, read in pieces; raises OSError."""
    with open(path, "rb") as stream:
        return stream_digest(stream)


def stream_digest(stream: BinaryIO) -> str:
    """blake3 (64 hex) of what can be read from a stream, read in pieces; raises OSError."""
    from blake3 import blake3

    digest = blake3()
    while chunk := stream.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def cache_key(pixels: str, spec: EncodeSpec, tower_fingerprint: str) -> str:
    """Key (64 hex) of the embedding of the page with pixel digest `pixels`."""
    parts = {
        "version": KEY_VERSION,
        "pixels": pixels,
        "spec": asdict(spec),
        "tower": tower_fingerprint,
    }
    return hashlib.sha256(canonical_json(parts)).hexdigest()


def payload_digest(
    key: str, rows: int, width: int, grid: Grid | None, planes: Sequence[bytes | memoryview]
) -> str:
    """blake3 (64 hex) of an entry: its key, shape and grid, then the planes as stored."""
    from blake3 import blake3

    head = {"key": key, "rows": rows, "width": width, "grid": None if grid is None else list(grid)}
    digest = blake3(canonical_json(head))
    for plane in planes:
        digest.update(len(plane).to_bytes(8, "little"))
        digest.update(plane)
    return digest.hexdigest()
