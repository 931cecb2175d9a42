"""One cache entry: a page's embedding, as two byte planes in a Parquet file of one row."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.geometry import Grid, tokens
from pipeline.keys import EncodeSpec, canonical_json, payload_digest, text_digest
from pipeline.store.layout import FORMAT_VERSION
from pipeline.store.planes import Plane, all_finite, joined, split

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

DTYPE = "bfloat16"
_END_BYTES = 8  # of a Parquet file: the length of its footer, and PAR1
_FOOTER_KEY = b"pipeline.entry"
_CHECK_KEY = b"pipeline.entry.blake3"  # of the value of _FOOTER_KEY; the first entries lack it


class Compression(Enum):
    """How the high plane is stored; no part of a key, entries of either kind are read alike."""

    ZSTD = "zstd"
    NONE = "none"


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
    high: Plane
    low: Plane

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
        high, low = split(bits)
        footer = Footer(
            format_version=FORMAT_VERSION,
            key=key,
            family=spec.family,
            tower_fingerprint=tower_fingerprint,
            spec_json=_spec_json(spec),
            rows=rows,
            width=width,
            dtype=DTYPE,
            grid=grid,
            source_width_px=source_size[1],
            source_height_px=source_size[0],
            tiles=tiles,
            finite=all_finite(high, low),
            digest=payload_digest(key, rows, width, grid, (high, low)),
            made_by=made_by,
        )
        return cls(footer, high, low)

    def bits(self) -> NDArray[np.uint16]:
        """The values' bits, uint16 of shape (rows, width); one copy."""
        return joined(self.high, self.low).reshape(self.footer.rows, self.footer.width)

    def tensor(self) -> torch.Tensor:
        """The embedding, bfloat16 of shape (rows, width); one copy."""
        import torch

        return torch.from_numpy(self.bits()).view(torch.bfloat16)


@functools.lru_cache(maxsize=8)
def _spec_json(spec: EncodeSpec) -> str:
    return canonical_json(asdict(spec)).decode()


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
    if not all_finite(*planes):
        return "it holds values that are not finite"
    return None


def to_parquet(entry: Entry, compression: Compression = Compression.ZSTD) -> memoryview:
    """The entry as the bytes of a Parquet file of one row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema()
    scalars = {field.name: getattr(entry.footer, field.name) for field in fields(Footer)}
    scalars["grid"] = None if entry.footer.grid is None else list(entry.footer.grid)
    row = pa.array([scalars], pa.struct(list(schema)[: len(scalars)]))
    columns = [*row.flatten(), _cell(entry.high), _cell(entry.low)]
    footer = canonical_json(scalars)
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        schema,
        compression={"high": compression.value},
        compression_level={"high": 1} if compression is Compression.ZSTD else None,
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,  # 3 KB, and Parquet's own types say it all
    ) as writer:
        writer.write_table(pa.Table.from_arrays(columns, schema=schema))
        writer.add_key_value_metadata({_FOOTER_KEY: footer, _CHECK_KEY: text_digest(footer)})
    return memoryview(sink.getvalue())


@functools.cache
def _schema() -> pa.Schema:
    """The columns of `cache/README.md`."""
    import pyarrow as pa

    types = {"int": pa.int64(), "str": pa.string(), "bool": pa.bool_()}
    types["Grid | None"] = pa.list_(pa.int64())
    columns = [(field.name, types[str(field.type)]) for field in fields(Footer)]
    return pa.schema([*columns, ("high", pa.binary()), ("low", pa.binary())])


def _cell(plane: Plane) -> pa.BinaryArray:
    """A column of one value: the plane itself, not a copy of it."""
    import pyarrow as pa

    ends = np.array([0, len(plane)], np.int32)
    return pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer(ends), pa.py_buffer(plane)])


def read_footer(tail: bytes) -> Footer:
    """The footer in the last bytes of an entry's file; raises if it can't be parsed."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    return _parse_footer(pq.read_metadata(pa.BufferReader(tail)).metadata or {})


def from_parquet(data: bytes, *, columns: bool = False) -> Entry:
    """The entry in a Parquet file's bytes; raises whatever pyarrow raises if it is damaged.

    `columns` says to read what the footer repeats, too. An old entry, whose footer has no digest,
    is always read so.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
    metadata = file.metadata.metadata or {}
    footer = _parse_footer(metadata)
    low = _last_cell(data, footer.rows * footer.width)
    repeated = [field.name for field in fields(Footer)]
    names = repeated if columns or _CHECK_KEY not in metadata else []
    planes = ["high"] if low is not None else ["high", "low"]
    # without threads: one that lives at the end aborts the process, see apache/arrow#34314
    table = file.read([*names, *planes], use_threads=False)
    if names:
        (row,) = table.select(names).to_pylist()
        if canonical_json(row) != canonical_json(asdict(footer)):
            raise ValueError("columns and footer disagree")
    if low is None:
        low = memoryview(table["low"][0].as_buffer())
    high = memoryview(table["high"][0].as_buffer())
    return Entry(footer, high, low)


def _parse_footer(metadata: dict[bytes, bytes]) -> Footer:
    if _FOOTER_KEY not in metadata:
        raise ValueError("the file is no cache entry")
    text = metadata[_FOOTER_KEY]
    if (noted := metadata.get(_CHECK_KEY)) is not None and noted != text_digest(text).encode():
        raise ValueError("the footer does not match its digest")
    values = json.loads(text)
    if values["grid"] is not None:
        values["grid"] = tuple(values["grid"])
    return Footer(**values)


def _last_cell(data: bytes, size: int) -> memoryview | None:
    """The low plane of `size` bytes where it lies in the file; None if that is laid out otherwise.

    A plain value is its length and its bytes, and the last one ends where the file's footer
    begins. The entry's digest says whether these were they.
    """
    end = len(data) - _END_BYTES - int.from_bytes(data[-_END_BYTES:-4], "little")
    start = end - size
    if start < 4 or data[start - 4 : start] != size.to_bytes(4, "little"):
        return None
    return memoryview(data)[start:end]
