"""Packing: every token once, no sequence too long, little room left over."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from logitstore.consumer.bins import Piece, cut_pieces, pack_bins

documents = st.lists(st.integers(1, 70), max_size=60).map(lambda sizes: np.cumsum(sizes, dtype=np.int64))
lengths = st.integers(1, 40)


@given(documents, lengths)
def test_pack_bins_charges_every_token_but_each_documents_first_exactly_once(ends: np.ndarray, length: int) -> None:
    charged = sorted(
        token for pieces in pack_bins(ends, length) for piece in pieces for token in range(piece.begin + 1, piece.end)
    )
    begins = {0, *ends.tolist()}
    assert charged == [token for token in range(ends[-1] if len(ends) else 0) if token not in begins]


@given(documents, lengths)
def test_pack_bins_keeps_pieces_within_one_document_and_bins_within_one_sequence(ends: np.ndarray, length: int) -> None:
    for pieces in pack_bins(ends, length):
        assert 1 <= sum(piece.num_tokens - 1 for piece in pieces) <= length
        for piece in pieces:
            assert piece.num_tokens >= 2
            assert np.searchsorted(ends, piece.begin, "right") == np.searchsorted(ends, piece.end - 1, "right")


@given(documents, lengths)
def test_pack_bins_leaves_no_two_bins_that_fit_in_one(ends: np.ndarray, length: int) -> None:
    """So all bins but one are more than half full on average, whatever the documents."""
    sizes = sorted(sum(piece.num_tokens - 1 for piece in pieces) for pieces in pack_bins(ends, length))
    assert all(a + b > length for a, b in itertools.pairwise(sizes))
    assert sum(sizes) * 2 > length * (len(sizes) - 1)


@given(documents, lengths)
def test_pack_bins_is_best_fit_decreasing(ends: np.ndarray, length: int) -> None:
    """Against the plain quadratic algorithm."""
    bins: list[list[Piece]] = []
    for piece in sorted(cut_pieces(ends, length), key=lambda piece: (-piece.num_tokens, piece.begin)):
        rooms = [(length - sum(p.num_tokens - 1 for p in pieces), number) for number, pieces in enumerate(bins)]
        fitting = [(room, number) for room, number in rooms if room >= piece.num_tokens - 1]
        if fitting:
            bins[min(fitting)[1]].append(piece)
        else:
            bins.append([piece])
    assert pack_bins(ends, length) == [tuple(pieces) for pieces in bins]


def test_pack_bins_wastes_little_on_ordinary_documents() -> None:
    sizes = np.random.default_rng(0).lognormal(4.5, 1.0, 2000).astype(np.int64) + 2
    bins = pack_bins(np.cumsum(sizes), 1024)
    assert (sizes - 1).sum() / (1024 * len(bins)) > 0.99


def test_cut_pieces_splits_long_documents_with_one_token_of_context() -> None:
    assert cut_pieces(np.array([1, 11]), 4) == [Piece(1, 6), Piece(5, 10), Piece(9, 11)]


def test_pack_bins_is_empty_without_anything_to_predict() -> None:
    assert pack_bins(np.array([1, 2, 3]), 4) == []
    assert pack_bins(np.array([], np.int64), 4) == []
