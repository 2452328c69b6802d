"""Sparse rows: ragged in memory, rectangular to a reader, and the same thing in both forms."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sparse_strategies import assert_equal_rows, random_rows, rows_of, sparse_rows

from logitstore.sparse import (
    DEFAULT_STEP_NATS,
    FILL,
    MAX_DRAWS,
    MAX_QUANTA,
    NOT_STORED,
    SparseRows,
    coarse_quanta,
    dequantise,
    quantise,
)


@given(sparse_rows(), st.integers(0, 3))
def test_rectangle_round_trip_of_any_rows(rows, spare_columns):
    table = rows.rectangle(int(rows.counts.max(initial=0)) + spare_columns)
    assert table.dtype == np.uint64
    assert ((table != FILL).sum(axis=1) == rows.counts).all()
    assert_equal_rows(SparseRows.from_rectangle(table), rows)


def test_entries_are_packed_as_documented():
    rows = rows_of([[(5, 3, 0), (0x7FFFFFFF, NOT_STORED, MAX_DRAWS)], []])
    assert rows.rectangle(3).tolist() == [
        [5 | 3 << 32, 0x7FFFFFFF | 0xFFFF << 32 | 0xFFFE << 48, int(FILL)],
        [int(FILL)] * 3,
    ]
    assert rows.scored.tolist() == [True, False]
    np.testing.assert_array_equal(rows.logprobs(), np.float32([np.float32(3) * np.float32(-0.1), np.nan]))
    assert rows.sampled.tolist() == [False, True]


def test_logprobs_are_whole_steps_in_float32():
    table = rows_of([[(5, 3, 0), (6, MAX_QUANTA, 0)]]).rectangle(2)
    logprobs = SparseRows.from_rectangle(table, step_nats=0.25).logprobs()
    assert logprobs.tolist() == [-0.75, -MAX_QUANTA * 0.25]


def test_from_rectangle_with_an_entry_right_of_fill_is_refused():
    table = rows_of([[(1, 1, False), (2, 2, False)]]).rectangle(2)
    with pytest.raises(ValueError, match="right of fill"):
        SparseRows.from_rectangle(np.array([[FILL, table[0, 0]]]))


@pytest.mark.parametrize(
    ("entry", "message"),
    [(7 | 1 << 31, "bit 31"), (7 | 0xFFFF << 48, "draws"), (7 | 0xFFFF << 32, "kept for certain")],
    ids=["id", "draws", "certain without log-prob"],
)
def test_from_rectangle_with_what_no_entry_may_hold_is_refused(entry, message):
    with pytest.raises(ValueError, match=message):
        SparseRows.from_rectangle(np.array([[entry]], np.uint64))


@given(sparse_rows(), st.data())
def test_slices_put_together_again_are_the_rows(rows, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, rows.num_rows), max_size=3)))
    edges = [0, *cuts, rows.num_rows]
    slices = [rows.slice_rows(begin, end) for begin, end in itertools.pairwise(edges)]
    assert_equal_rows(SparseRows.concatenate(slices), rows)
    assert sum(part.num_entries for part in slices) == rows.num_entries


def test_slice_rows_of_many_rows():
    rows = random_rows(1000)
    part = rows.slice_rows(300, 310)
    assert part.rectangle(20).tolist() == rows.rectangle(20)[300:310].tolist()


@given(st.floats(-4000.0, 0.0))
def test_quantise_is_within_half_a_step(logprob):
    quanta = quantise(np.array([logprob]))
    assert quanta.dtype == np.uint16
    assert abs(quanta[0] * -DEFAULT_STEP_NATS - logprob) <= DEFAULT_STEP_NATS / 2 + 1e-9


def test_quantise_clips_at_both_ends():
    """A log-prob just above 0 is rounding noise of a forward pass; below -6553 nats there is nothing to tell apart."""
    assert quantise(np.array([1e-6, 0.0, -1e9, -np.inf])).tolist() == [0, 0, MAX_QUANTA, MAX_QUANTA]


@pytest.mark.parametrize(("step_nats", "tail_step_nats"), [(0.1, 1.6), (0.1, 0.1), (0.25, 2.0), (0.125, 0.3)])
def test_coarse_quanta_keep_order_and_their_bounds(step_nats, tail_step_nats):
    coarse = coarse_quanta(step_nats, tail_step_nats).astype(np.int64)
    quanta = np.arange(len(coarse))
    assert len(coarse) == MAX_QUANTA + 1
    assert (np.diff(coarse) >= 0).all()
    assert (np.abs(coarse - quanta) * step_nats <= tail_step_nats / 2 + 1e-9).all()
    likely = quanta * step_nats < 3 * np.log(4)  # p > 1/64
    assert (coarse[likely] == quanta[likely]).all()


def test_coarse_quanta_cost_little_divergence():
    """On a power law of 128 entries: little more divergence than even steps, with half of the values."""
    logprobs = -1.3 * np.log(np.arange(1, 129))
    logprobs -= np.log(np.exp(logprobs).sum() / 0.97)
    even = quantise(logprobs, 0.1)
    coarse = coarse_quanta(0.1, 1.6)[even]

    def divergence(quanta):
        decoded = dequantise(quanta, 0.1).astype(np.float64)
        return float((np.exp(logprobs) * (logprobs - decoded) - np.exp(logprobs) + np.exp(decoded)).sum())

    assert len(np.unique(coarse)) < 0.55 * len(np.unique(even))
    assert divergence(even) < divergence(coarse) < 2e-3
