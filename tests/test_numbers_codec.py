"""The entropy coder: any numbers in any contexts come back, at about their entropy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitstore.codecs import rans
from logitstore.codecs.numbers import NumberReader, encode_numbers
from logitstore.errors import DamageError

NUMBERS = st.integers(0, 20) | st.integers(0, 2**31 - 1)


def test_symbols_cover_the_numbers_without_gap_or_overlap():
    ends = [rans.smallest_of(symbol) + (1 << rans.extra_bits_of(symbol)) for symbol in range(124)]
    assert [rans.smallest_of(symbol) for symbol in range(124)] == [0, *ends[:-1]]
    assert ends[-1] == 1 << 31
    for number in (0, 15, 16, 19, 20, 31, 32, 12345, 2**31 - 1):
        symbol = rans.symbol_of(number)
        assert rans.smallest_of(symbol) <= number < ends[symbol]


@given(st.lists(st.tuples(NUMBERS, st.integers(0, 6)), max_size=60), st.data())
def test_numbers_round_trip_read_in_pieces(pairs, data):
    numbers, contexts = np.array([p[0] for p in pairs], np.int64), np.array([p[1] for p in pairs], np.int32)
    reader = NumberReader(memoryview(encode_numbers(numbers, contexts, 7)), "test")
    cut = data.draw(st.integers(0, len(pairs)))
    found = np.concatenate([reader.read(contexts[:cut]), reader.read(contexts[cut:])])
    reader.finish()
    assert found.tolist() == numbers.tolist()


def test_numbers_cost_about_their_entropy():
    rng = np.random.default_rng(0)
    numbers = rng.geometric(0.4, 100_000) - 1
    shares = np.bincount(numbers) / len(numbers)
    entropy_bytes = -(shares[shares > 0] * np.log2(shares[shares > 0])).sum() * len(numbers) / 8
    assert len(encode_numbers(numbers, np.zeros(len(numbers), np.int32), 1)) < 1.005 * entropy_bytes + 100


def test_what_is_left_unread_is_damage():
    data = memoryview(encode_numbers(np.arange(9), np.zeros(9, np.int32), 1))
    reader = NumberReader(data, "test")
    reader.read(np.zeros(8, np.int32))
    with pytest.raises(DamageError, match="more than was declared"):
        reader.finish()


def test_reading_on_past_the_end_is_damage():
    """Numbers that cost something run out of words; contexts without a table have none."""
    numbers = np.arange(3000) % 7
    reader = NumberReader(memoryview(encode_numbers(numbers, np.zeros(3000, np.int32), 2)), "test")
    with pytest.raises(DamageError, match="too early"):
        reader.read(np.zeros(10_000, np.int32))
    for context in (1, 2):
        reader = NumberReader(memoryview(encode_numbers(numbers, np.zeros(3000, np.int32), 2)), "test")
        with pytest.raises(DamageError):
            reader.read(np.full(1, context, np.int32))


@pytest.mark.parametrize("counts", [[1], [1, 1], [10**9, 1], [0, 3, 0, 5], list(range(1, 129)), [10**6] + [1] * 127])
def test_frequencies_add_up_and_leave_nothing_out(counts):
    counts_CS = np.zeros((2, rans.ALPHABET), np.int64)
    counts_CS[0, : len(counts)] = counts
    frequencies_CS = rans.frequencies_of(counts_CS)
    assert frequencies_CS.sum(axis=1).tolist() == [1 << rans.PRECISION, 0]
    assert ((frequencies_CS[0] > 0) == (counts_CS[0] > 0)).all()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, rans.MAX_SET])
def test_uniform_numbers_are_popped_as_they_were_pushed(size):
    words, numbers = np.zeros(4000, np.uint32), np.random.default_rng(size).integers(0, size, 500)
    state, top = np.uint64(rans.INITIAL_STATE), 0
    for number in numbers:
        state, top = rans.push_uniform(state, words, top, int(number), size)
    assert 32 * top <= 500 * np.log2(size) * 1.01 + 64
    for number in numbers[::-1]:
        state, top, found = rans.pop_uniform(state, words, top, size)
        assert found == number
    assert (state, top) == (rans.INITIAL_STATE, 0)
