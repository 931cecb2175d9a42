"""One cache entry: a page's embedding as a Parquet file of one row.

bfloat16 values are kept as two byte planes. The high bytes (sign and exponent) of activations
repeat, zstd takes half of them away; the low bytes are noise and stay plain.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.geometry import Grid, tokens
from pipeline.keys import EncodeSpec, canonical_json, payload_digest
from pipeline.store.layout import FORMAT_VERSION

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

DTYPE = "bfloat16"
_FOOTER_KEY = b"pipeline.entry"


@dataclass(frozen=True, slots=True)
class Footer:
    """What is known of an entry without its payload; the columns of `cache/README.md`.

    `rows` × `width` values of `dtype`; `grid` in patches, None for 1-D positions.
    """

    format_version: int
    key: str
    family: str
    tower_fingerprint: str
    spec_json: str
    rows: int
    width: int
    dtype: str
    grid: Grid | None
    source_width_px: int
    source_height_px: int
    tiles: int
    finite: bool
    digest: str
    made_by: str = ""

    @property
    def embedding_bytes(self) -> int:
        """Size of the embedding itself, two bytes a value."""
        return 2 * self.rows * self.width


@dataclass(frozen=True, slots=True)
class BadEntry:
    """An entry that must not be used: the reader treats it as a miss."""

    key: str
    why: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A footer with its two planes of rows·width bytes each."""

    footer: Footer
    high: bytes | memoryview
    low: bytes | memoryview

    @classmethod
    def from_bits(
        cls,
        bits: NDArray[np.uint16],
        *,
        key: str,
        spec: EncodeSpec,
        tower_fingerprint: str,
        grid: Grid | None,
        source_size: tuple[int, int],
        tiles: int = 1,
        made_by: str = "",
    ) -> Entry:
        """The entry of bfloat16 values given as their bits, uint16 of shape (rows, width).

        `source_size` is (height, width) of the page in px as decoded.
        """
        rows, width = bits.shape
        pairs = np.ascontiguousarray(bits, dtype="<u2").view(np.uint8).reshape(-1, 2)
        high, low = pairs[:, 1].tobytes(), pairs[:, 0].tobytes()
        footer = Footer(
            format_version=FORMAT_VERSION,
            key=key,
            family=spec.family,
            tower_fingerprint=tower_fingerprint,
            spec_json=canonical_json(asdict(spec)).decode(),
            rows=rows,
            width=width,
            dtype=DTYPE,
            grid=grid,
            source_width_px=source_size[1],
            source_height_px=source_size[0],
            tiles=tiles,
            finite=planes_finite(high, low),
            digest=payload_digest(key, rows, width, grid, (high, low)),
            made_by=made_by,
        )
        return cls(footer, high, low)

    def bits(self) -> NDArray[np.uint16]:
        """The values' bits, uint16 of shape (rows, width); one copy."""
        pairs = np.empty((self.footer.rows * self.footer.width, 2), dtype=np.uint8)
        pairs[:, 0] = np.frombuffer(self.low, dtype=np.uint8)
        pairs[:, 1] = np.frombuffer(self.high, dtype=np.uint8)
        return pairs.view("<u2").reshape(self.footer.rows, self.footer.width)

    def tensor(self) -> torch.Tensor:
        """The embedding, bfloat16 of shape (rows, width); one copy."""
        import torch

        return torch.from_numpy(self.bits()).view(torch.bfloat16)


def planes_finite(high: bytes | memoryview, low: bytes | memoryview) -> bool:
    """True if no value is infinite or NaN, that is, has all eight exponent bits set."""
    exponent_high = (np.frombuffer(high, dtype=np.uint8) & 0x7F) == 0x7F
    exponent_low = (np.frombuffer(low, dtype=np.uint8) & 0x80) == 0x80
    return not bool(np.any(exponent_high & exponent_low))


def footer_problem(footer: Footer, key: str, tower_fingerprint: str) -> str | None:
    """Why an entry with this footer can't be served under `key`; None if it can."""
    try:
        geometry = json.loads(footer.spec_json)["geometry"]
        merge_size = 1 if footer.grid is None else int(geometry["merge_size"])
    except (ValueError, KeyError, TypeError):
        return "its spec is unreadable"
    if footer.format_version != FORMAT_VERSION:
        return f"format version {footer.format_version}, expected {FORMAT_VERSION}"
    if footer.key != key:
        return f"it holds the entry of key {footer.key[:12]}…"
    if footer.tower_fingerprint != tower_fingerprint:
        return f"it was made by tower {footer.tower_fingerprint[:12]}…"
    if footer.dtype != DTYPE:
        return f"values are {footer.dtype}, expected {DTYPE}"
    if footer.rows < 1 or footer.width < 1:
        return f"shape ({footer.rows}, {footer.width}) is empty"
    if footer.grid is not None and not _grid_fits(footer.grid, footer.rows, merge_size):
        return f"{footer.rows} rows do not fit grid {list(footer.grid)}"
    if not footer.finite:
        return "it holds values that are not finite"
    return None


def _grid_fits(grid: Grid, rows: int, merge_size: int) -> bool:
    if len(grid) != 3 or min(grid) < 1 or merge_size < 1:
        return False
    if grid[1] % merge_size or grid[2] % merge_size:
        return False
    return tokens(grid, merge_size) == rows


def entry_problem(entry: Entry, key: str, tower_fingerprint: str) -> str | None:
    """Why `entry` must not be used; None if footer, planes and digest agree."""
    footer = entry.footer
    if (problem := footer_problem(footer, key, tower_fingerprint)) is not None:
        return problem
    size = footer.rows * footer.width
    if len(entry.high) != size or len(entry.low) != size:
        return f"planes of {len(entry.high)} and {len(entry.low)} bytes, expected {size}"
    planes = (entry.high, entry.low)
    if payload_digest(key, footer.rows, footer.width, footer.grid, planes) != footer.digest:
        return "the payload does not match its digest"
    if not planes_finite(*planes):
        return "it holds values that are not finite"
    return None


def to_parquet(entry: Entry) -> memoryview:
    """The entry as the bytes of a Parquet file of one row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    scalars = {field.name: getattr(entry.footer, field.name) for field in fields(Footer)}
    scalars["grid"] = None if entry.footer.grid is None else list(entry.footer.grid)
    columns = {
        name: pa.array([value], type=_arrow_type(pa, name, value))
        for name, value in scalars.items()
    }
    columns |= {
        "high": pa.array([entry.high], pa.binary()),
        "low": pa.array([entry.low], pa.binary()),
    }
    table = pa.table(columns).replace_schema_metadata({_FOOTER_KEY: canonical_json(scalars)})
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression={"high": "zstd"},
        compression_level={"high": 1},
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    )
    return memoryview(sink.getvalue())


def _arrow_type(pa: Any, name: str, value: Any) -> pa.DataType:
    if name == "grid":
        return pa.list_(pa.int64())
    return {bool: pa.bool_(), int: pa.int64(), str: pa.string()}[type(value)]


def read_footer(tail: bytes) -> Footer:
    """The footer in the last bytes of an entry's file; raises if it can't be parsed."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    return _parse_footer(pq.read_metadata(pa.BufferReader(tail)).metadata)


def from_parquet(data: bytes) -> Entry:
    """The entry in a Parquet file's bytes; raises whatever pyarrow raises if it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
    footer = _parse_footer(file.metadata.metadata)
    # without threads: one that lives at the end aborts the process, see apache/arrow#34314
    (row,) = file.read([field.name for field in fields(Footer)], use_threads=False).to_pylist()
    if canonical_json(row) != canonical_json(asdict(footer)):
        raise ValueError("columns and footer disagree")
    planes = file.read(["high", "low"], use_threads=False)
    high, low = (memoryview(planes[name][0].as_buffer()) for name in ("high", "low"))
    return Entry(footer, high, low)


def _parse_footer(metadata: dict[bytes, bytes] | None) -> Footer:
    if not metadata or _FOOTER_KEY not in metadata:
        raise ValueError("the file is no cache entry")
    values = json.loads(metadata[_FOOTER_KEY])
    if values["grid"] is not None:
        values["grid"] = tuple(values["grid"])
    return Footer(**values)
