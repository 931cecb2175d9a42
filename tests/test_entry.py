"""An entry is a Parquet file that anybody reads, in either compression, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from makers_cache import SPEC, TOWER, entry

from pipeline.geometry import Grid, tokens
from pipeline.store import BadEntry, Compression, Entry, Store
from pipeline.store.check import entry_of
from pipeline.store.entry import to_parquet

README = Path(__file__).parents[1] / "cache" / "README.md"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "cache", TOWER)
    yield store
    assert store.verify() == []


def wide(seed: int) -> Entry:
    """An entry whose 320,000 bytes outweigh the columns about it."""
    return entry(seed, rows=400, width=400)


grids = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)).map(
    lambda merged: (merged[0], 2 * merged[1], 2 * merged[2])
)


@settings(max_examples=60, deadline=None)
@given(
    grid=grids,
    flat=st.booleans(),
    width=st.integers(1, 40),
    seed=st.integers(0, 2**32),
    compression=st.sampled_from(Compression),
)
def test_any_finite_bits_of_any_shape_come_back(
    grid: Grid, flat: bool, width: int, seed: int, compression: Compression
) -> None:
    rows = tokens(grid, 2)
    bits = np.random.default_rng(seed).integers(0, 65536, (rows, width)).astype(np.uint16)
    bits[(bits & 0x7F80) == 0x7F80] ^= 0x4000
    put = Entry.from_bits(
        bits,
        key=f"{seed:064x}",
        spec=SPEC,
        tower_fingerprint=TOWER,
        grid=None if flat else grid,
        source_size=(1, 1),
    )
    got = entry_of(bytes(to_parquet(put, compression)), put.footer.key, TOWER)
    assert isinstance(got, Entry) and got.footer == put.footer
    assert np.array_equal(got.bits(), bits)


def test_entries_of_either_compression_lie_in_one_cache(store: Store) -> None:
    plain = replace(store, compression=Compression.NONE)
    small, large = store.put(wide(1)), plain.put(wide(2))
    assert small < 0.82 * 320_000 < 320_000 < large
    for each in (store, plain):
        for seed in (1, 2):
            got = each.get(wide(seed).footer.key)
            assert isinstance(got, Entry)
            assert np.array_equal(got.bits(), wide(seed).bits())
    plain.put(wide(1))
    assert store.path(wide(1).footer.key).stat().st_size == small, "it is no part of the key"


def test_a_file_laid_out_otherwise_is_read_all_the_same(store: Store) -> None:
    """As other programs write it: with the columns in another order, or a compressed low plane."""
    put = entry(1)
    table = pq.read_table(pa.BufferReader(to_parquet(put)))
    for names in (table.column_names, table.column_names[::-1]):
        for compression in ("none", "snappy"):
            sink = pa.BufferOutputStream()
            pq.write_table(table.select(names), sink, compression=compression)
            got = entry_of(sink.getvalue().to_pybytes(), put.footer.key, TOWER)
            assert isinstance(got, Entry), got
            assert np.array_equal(got.bits(), put.bits())


def test_the_footer_has_a_digest_and_the_columns_repeat_it(store: Store) -> None:
    put = entry(1)
    table = pq.read_table(pa.BufferReader(to_parquet(put)))
    metadata = pq.read_metadata(pa.BufferReader(to_parquet(put))).metadata
    other = table.set_column(table.column_names.index("family"), "family", [["another"]])
    other = other.replace_schema_metadata(None)

    def written(**changed: bytes) -> bytes:
        sink = pa.BufferOutputStream()
        with pq.ParquetWriter(sink, other.schema) as writer:
            writer.write_table(other)
            writer.add_key_value_metadata(metadata | {k.encode(): v for k, v in changed.items()})
        return bytes(sink.getvalue())

    def read(data: bytes, columns: bool) -> Entry | BadEntry:
        return entry_of(data, put.footer.key, TOWER, columns=columns)

    got = read(written(), columns=False)
    assert isinstance(got, Entry) and got.footer == put.footer
    got = read(written(), columns=True)
    assert isinstance(got, BadEntry) and "columns and footer disagree" in got.why
    footer = metadata[b"pipeline.entry"].replace(b'"tiles":1', b'"tiles":2')
    got = read(written(**{"pipeline.entry": footer}), columns=False)
    assert isinstance(got, BadEntry) and "the footer does not match its digest" in got.why
    del metadata[b"pipeline.entry.blake3"]  # as the first entries were written
    got = read(written(), columns=False)
    assert isinstance(got, BadEntry) and "columns and footer disagree" in got.why


def test_the_high_plane_is_compressed_and_the_low_one_is_not(store: Store) -> None:
    put = wide(1)
    size = store.put(put)
    group = pq.read_metadata(store.path(put.footer.key)).row_group(0)
    columns = {group.column(n).path_in_schema: group.column(n) for n in range(group.num_columns)}
    assert (columns["high"].compression, columns["low"].compression) == ("ZSTD", "UNCOMPRESSED")
    assert columns["high"].total_compressed_size < 0.6 * 160_000
    assert size < 0.82 * 2 * 160_000


@pytest.mark.parametrize("compression", Compression)
def test_the_readme_decodes_an_entry(store: Store, compression: Compression) -> None:
    put = entry(1)
    replace(store, compression=compression).put(put)
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    code = code.replace("cache/v1/…/….parquet", str(store.path(put.footer.key)))
    names: dict[str, np.ndarray] = {}
    exec(code, names)
    assert np.array_equal(names["embedding"].view(np.uint32) >> 16, put.bits())
