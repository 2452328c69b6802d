"""Windows and packed batches: every token predicted once, from its own document, whatever the lengths."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from teachers import token_block

from logitstore.producer.packing import PackedBatch, Windows, cut_windows, pack
from logitstore.token_parts import TokenBlock

_LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@st.composite
def _windows(draw: st.DrawFn) -> Windows:
    length = draw(st.integers(2, 16))
    return Windows(length, draw(st.integers(0, length - 1)))


def _block(lengths: list[int]) -> TokenBlock:
    """Each token is its own place in the block, so that a batch's ids say where it was taken from."""
    starts = np.cumsum([0, *lengths])
    return token_block([list(range(a, b)) for a, b in itertools.pairwise(starts)])


def _starts(batch: PackedBatch) -> np.ndarray:
    """Where in the batch the window of each of its tokens begins."""
    return np.maximum.accumulate(np.where(batch.positions == 0, np.arange(len(batch.ids)), 0))


@given(_LENGTHS, _windows(), st.integers(1, 64))
def test_rows_each_predicted_once(lengths: list[int], windows: Windows, batch_tokens: int) -> None:
    tokens = _block(lengths)
    batches = pack(tokens, windows, batch_tokens)
    rows = np.concatenate([batch.rows for batch in batches]) if batches else np.empty(0, int)
    expected = np.setdiff1d(np.arange(tokens.num_tokens), tokens.begins)
    np.testing.assert_array_equal(np.sort(rows), expected)


@given(_LENGTHS, _windows(), st.integers(1, 64))
def test_batches_hold_windows_of_one_document(lengths: list[int], windows: Windows, batch_tokens: int) -> None:
    tokens = _block(lengths)
    documents = np.searchsorted(tokens.ends, np.arange(tokens.num_tokens), side="right")
    for batch in pack(tokens, windows, batch_tokens):
        starts = _starts(batch)
        # A window's inputs follow each other in one document, and its positions count them.
        np.testing.assert_array_equal(batch.ids, batch.ids[starts] + batch.positions)
        np.testing.assert_array_equal(documents[batch.ids], documents[batch.ids[starts]])
        assert batch.positions.max() < windows.length
        # An output's input is the token just before the row, of the same document.
        np.testing.assert_array_equal(batch.ids[batch.outputs] + 1, batch.rows)
        np.testing.assert_array_equal(documents[batch.ids[batch.outputs]], documents[batch.rows])


@given(_LENGTHS, _windows(), st.integers(1, 64))
def test_batches_within_budget_unless_one_window(lengths: list[int], windows: Windows, batch_tokens: int) -> None:
    for batch in pack(_block(lengths), windows, batch_tokens):
        assert len(batch.ids) <= batch_tokens or (batch.positions == 0).sum() == 1


@given(_LENGTHS, _windows())
def test_rows_scored_in_first_window_that_reaches_them(lengths: list[int], windows: Windows) -> None:
    tokens = _block(lengths)
    for batch in pack(tokens, windows, 64):
        begins = tokens.begins[np.searchsorted(tokens.ends, batch.rows - 1, side="right")]
        context = batch.positions[batch.outputs] + 1
        # Either all that the document has before the row, or a window's overlap and what has come since.
        complete = context == batch.rows - begins
        assert (complete | ((context > windows.overlap) & (context <= windows.length))).all()
        assert complete[batch.rows - begins <= windows.length].all()


@given(_LENGTHS, _windows())
def test_windows_overlap_as_asked(lengths: list[int], windows: Windows) -> None:
    tokens = _block(lengths)
    for before, after in itertools.pairwise(cut_windows(tokens, windows)):
        if after.first in tokens.begins:
            assert after.begin == after.first
        else:
            assert after.first == before.end
            assert after.begin == after.first - windows.overlap


def test_windows_of_long_document_by_hand() -> None:
    cut = cut_windows(_block([3, 11]), Windows(length=4, overlap=1))
    assert [(window.begin, window.first, window.end) for window in cut] == [
        (0, 0, 2),  # the last token is no input
        (3, 3, 7),
        (6, 7, 10),
        (9, 10, 13),
    ]


def test_documents_of_one_token_leave_no_batch() -> None:
    assert pack(_block([1, 1]), Windows(8, 2), 16) == []


@given(_LENGTHS, _windows(), st.integers(1, 64))
def test_batches_depend_on_block_only(lengths: list[int], windows: Windows, batch_tokens: int) -> None:
    first, second = (pack(_block(lengths), windows, batch_tokens) for _ in range(2))
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        for name in ("ids", "positions", "outputs", "rows"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_batches_fill_their_budget() -> None:
    batches = pack(_block([9] * 40), Windows(16, 4), 64)
    # Eight inputs each, eight to a batch.
    assert [len(batch.ids) for batch in batches] == [64] * 5
