"""Hypothesis strategies and samples of sparse rows, for the tests of whatever holds them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from logitstore.sparse import MAX_DRAWS, MAX_QUANTA, NOT_STORED, SparseRows, offsets_of

_IDS = st.integers(0, 300) | st.sampled_from([0xFF, 0x100, 0xFFFF, 0x10000, 0xFFFFFF, 0x1000000, 0x7FFFFFFF])
_DRAWS = st.integers(0, 3) | st.sampled_from([0xFF, 0x100, MAX_DRAWS])
_ENTRIES = st.tuples(_IDS, st.integers(0, MAX_QUANTA), _DRAWS) | st.tuples(
    _IDS, st.just(NOT_STORED), _DRAWS.filter(lambda draws: draws > 0)
)


def sparse_rows(max_rows: int = 12) -> st.SearchStrategy[SparseRows]:
    """Any rows at all, unscored ones among them."""
    return st.lists(st.lists(_ENTRIES, max_size=6), max_size=max_rows).map(rows_of)


def rows_of(rows: list[list[tuple[int, int, int]]]) -> SparseRows:
    """Rows of (id, quanta, draws)."""
    entries = [entry for row in rows for entry in row]
    columns = list(zip(*entries, strict=True)) if entries else [(), (), ()]
    return SparseRows(
        offsets_of(np.array([len(row) for row in rows], np.int64)),
        np.array(columns[0], np.int32),
        np.array(columns[1], np.uint16),
        np.array(columns[2], np.uint16),
    )


def random_rows(num_rows: int, seed: int = 0, mean_entries: float = 4.0) -> SparseRows:
    """Rows as a teacher gives them: ragged, some unscored, behind the first entry by falling log-prob."""
    rng = np.random.default_rng(seed)
    counts = rng.poisson(mean_entries, num_rows) * (rng.random(num_rows) > 0.1)
    offsets = offsets_of(counts.astype(np.int64))
    rows = np.repeat(np.arange(num_rows), counts)
    quanta = rng.integers(0, 400, len(rows))
    first = np.isin(np.arange(len(rows)), offsets[:-1][counts > 0])
    order = np.lexsort((quanta, ~first, rows))
    ids = rng.integers(0, 50000, len(rows)).astype(np.int32)
    return SparseRows(offsets, ids, quanta[order].astype(np.uint16), (rng.random(len(rows)) < 0.5).astype(np.uint16))


def assert_equal_rows(a: SparseRows, b: SparseRows) -> None:
    assert a.offsets.tolist() == b.offsets.tolist()
    assert a.entries().tolist() == b.entries().tolist()
    for rows in (a, b):
        assert (rows.ids.dtype, rows.quanta.dtype, rows.draws.dtype) == (np.int32, np.uint16, np.uint16)
