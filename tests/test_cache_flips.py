"""A flip at every byte of an entry's file, and every length: refused, or the same answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from makers_cache import TOWER, entry

from pipeline.store import BadEntry, Compression, Entry, Store
from pipeline.store.check import entry_of


@pytest.fixture(scope="module", params=Compression)
def put(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, bytes, Entry]:
    """A small entry's file, its bytes, and what it holds."""
    made = entry(1, rows=2, width=8)
    store = Store(tmp_path_factory.mktemp("flips"), TOWER, request.param)
    store.put(made)
    path = store.path(made.footer.key)
    return path, path.read_bytes(), made


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("whole_byte", [False, True])
def test_every_flip_is_refused_or_changes_nothing(
    put: tuple[Path, bytes, Entry], whole_byte: bool, columns: bool
) -> None:
    _, whole, made = put
    refused = 0
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 0xFF if whole_byte else 1 << (place % 8)
        got = entry_of(bytes(data), made.footer.key, TOWER, columns=columns)
        refused += isinstance(got, BadEntry)
        if isinstance(got, Entry):
            assert got.footer == made.footer, place
            assert np.array_equal(got.bits(), made.bits()), place
    assert refused > len(whole) // (2 if columns else 3)


def test_every_length_is_refused(put: tuple[Path, bytes, Entry]) -> None:
    _, whole, made = put
    for length in range(len(whole)):
        got = entry_of(whole[:length], made.footer.key, TOWER)
        assert isinstance(got, BadEntry), length


def test_a_flip_is_never_another_footer(put: tuple[Path, bytes, Entry]) -> None:
    """A footer read alone has a digest of its own."""
    path, whole, made = put
    store = Store(path.parents[3], TOWER)
    try:
        for place in range(0, len(whole), 3):
            data = bytearray(whole)
            data[place] ^= 1 << (place % 8)
            path.write_bytes(data)
            footer = store.footer(made.footer.key)
            if footer is not None:
                assert footer == made.footer, place
    finally:
        path.write_bytes(whole)
    assert isinstance(store.get(made.footer.key), Entry)
