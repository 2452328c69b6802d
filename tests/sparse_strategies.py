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
    """Any rows at all that are in the stored order, unscored ones among them."""
    return st.lists(st.lists(_ENTRIES, max_size=6), max_size=max_rows).map(
        lambda rows: rows_of([in_stored_order(row) for row in rows])
    )


def in_stored_order(row: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The first entry kept for certain, then the others, of an id one each, by (quanta, id)."""
    unique = list({entry[0]: entry for entry in reversed(row)}.values())[::-1]
    if not unique:
        return []
    first_id, first_quanta, _ = unique[0]
    others = sorted(unique[1:], key=lambda entry: (entry[1], entry[0]))
    return [(first_id, min(first_quanta, MAX_QUANTA), 0), *others]


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
    """Rows as a teacher gives them: ragged, some unscored, tokens of a text of some regularity, half of them drawn."""
    rng = np.random.default_rng(seed)
    rows = []
    for count in rng.poisson(mean_entries, num_rows) * (rng.random(num_rows) > 0.1):
        ids = (rng.pareto(0.8, count) * 3).astype(np.int64) % 50000
        draws = rng.random(count) < 0.5
        rows.append(
            in_stored_order(list(zip(ids.tolist(), rng.integers(0, 99, count).tolist(), draws.tolist(), strict=True)))
        )
    return rows_of(rows)


def assert_equal_rows(a: SparseRows, b: SparseRows) -> None:
    assert a.offsets.tolist() == b.offsets.tolist()
    assert a.entries().tolist() == b.entries().tolist()
    for rows in (a, b):
        assert (rows.ids.dtype, rows.quanta.dtype, rows.draws.dtype) == (np.int32, np.uint16, np.uint16)
