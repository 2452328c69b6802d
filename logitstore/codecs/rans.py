"""An entropy coder for whole numbers: range asymmetric numeral systems (rANS) over static tables.

The coder is a stack (Duda 2013, arXiv 1311.2540): what is pushed last is popped first. Its state is one 64-bit number,
and words of 32 bits beneath it. Popping a uniform number from it *spends* bits that a later push gets back, which is
how sets are stored without paying for their order (``logitstore.codecs.row_contexts``).

A number is a symbol of an alphabet of ``ALPHABET`` (0 to 15 as they are, then four intervals an octave, up to 2^31) and
the bits that place it in its interval. Symbols have the frequencies of one of many tables; the bits are uniform.

Everything here is compiled, runs without the GIL, and uses integers only, so that all machines decode alike. Kernels
return a position of -1 where the words run out or run over: nothing is read or written past the end of an array.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

ALPHABET = 128
PRECISION = 12
"""Frequencies of a table add up to 2^12."""

_TOTAL = 1 << PRECISION
_SYMBOLS = np.arange(ALPHABET, dtype=np.uint8)
_EXACT = 16  # numbers below this are symbols of their own
_UNIFORM_BITS = 16
MAX_SET = 256
"""Sets are at most this large: a uniform number below it is drawn within 0.01 bits of its cost."""

_RECIPROCALS = np.array([0, *(-(-(1 << 32) // size) for size in range(1, MAX_SET + 1))], np.int64)

INITIAL_STATE = 1 << 31
_LOW = np.uint64(INITIAL_STATE)
_WORD = np.uint64(32)
_WORD_MASK = np.uint64(0xFFFF_FFFF)

kernel: Any = njit(cache=True, nogil=True, error_model="numpy")


class Tables(NamedTuple):
    """Frequencies of the symbols in each of C contexts, as the kernels want them.

    Attributes:
        ends: uint16 [C, ALPHABET + 1], running sums of the frequencies, 0 first; all 0 where a context has no table.
        symbols: uint8 [C, 2^PRECISION], the symbol that owns each slot; ``ALPHABET`` where a context has no table.
    """

    ends: np.ndarray
    symbols: np.ndarray


@kernel
def symbol_of(number):
    """The symbol of a number, 0 <= number < 2^31."""
    if number < _EXACT:
        return number
    octave = 4
    while number >> (octave + 1):
        octave += 1
    return _EXACT + 4 * (octave - 4) + ((number >> (octave - 2)) & 3)


@kernel
def extra_bits_of(symbol):
    """How many bits place a number within its symbol's interval."""
    return 0 if symbol < _EXACT else ((symbol - _EXACT) >> 2) + 2


@kernel
def smallest_of(symbol):
    """The smallest number with that symbol."""
    if symbol < _EXACT:
        return symbol
    return (4 + ((symbol - _EXACT) & 3)) << (((symbol - _EXACT) >> 2) + 2)


@kernel
def push(state, words, top, start, frequency, bits):
    """Push a symbol that owns the slots ``start`` to ``start + frequency`` of 2^bits."""
    if state >= ((_LOW >> np.uint64(bits)) << _WORD) * np.uint64(frequency):
        if top < 0 or top >= len(words):
            return state, -1
        words[top] = np.uint32(state & _WORD_MASK)
        top += 1
        state >>= _WORD
    frequency_ = np.uint64(frequency)
    quotient = state // frequency_
    return (quotient << np.uint64(bits)) + (state - quotient * frequency_) + np.uint64(start), top


@kernel
def pop(state, words, top, start, frequency, bits):
    """Undo a push, once the lowest ``bits`` of the state have shown which symbol it was."""
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    state = np.uint64(frequency) * (state >> np.uint64(bits)) + (state & mask) - np.uint64(start)
    if state < _LOW:
        if top <= 0:
            return state, -1
        top -= 1
        state = (state << _WORD) | np.uint64(words[top])
    return state, top


@kernel
def push_number(state, words, top, ends_CS, context, number):
    symbol = symbol_of(number)
    bits = extra_bits_of(symbol)
    if bits:
        state, top = push(state, words, top, number - smallest_of(symbol), 1, bits)
    start = np.int64(ends_CS[context, symbol])
    return push(state, words, top, start, np.int64(ends_CS[context, symbol + 1]) - start, PRECISION)


@kernel
def pop_number(state, words, top, ends_CS, symbols_CP, context):
    """State, words left, the number; -1 words are left where there is no such number."""
    symbol = np.int64(symbols_CP[context, np.int64(state & np.uint64(_TOTAL - 1))])
    if symbol >= ALPHABET:  # a context that has no table
        return state, -1, 0
    start = np.int64(ends_CS[context, symbol])
    state, top = pop(state, words, top, start, np.int64(ends_CS[context, symbol + 1]) - start, PRECISION)
    number = np.int64(smallest_of(symbol))
    bits = extra_bits_of(symbol)
    if bits and top >= 0:
        extra = np.int64(state & ((np.uint64(1) << np.uint64(bits)) - np.uint64(1)))
        state, top = pop(state, words, top, extra, 1, bits)
        number += extra
    return state, top, number


@kernel
def _start_of(number, size):
    """Where the slots of one of ``size`` equally likely numbers begin; those of ``size`` itself at 2^16."""
    return (number * _RECIPROCALS[size]) >> (32 - _UNIFORM_BITS)


@kernel
def push_uniform(state, words, top, number, size):
    """Push one of ``size`` equally likely numbers, size <= MAX_SET."""
    start = _start_of(number, size)
    return push(state, words, top, start, _start_of(number + 1, size) - start, _UNIFORM_BITS)


@kernel
def pop_uniform(state, words, top, size):
    """State, words left, a number below ``size``."""
    slot = np.int64(state & np.uint64((1 << _UNIFORM_BITS) - 1))
    number = (slot * size) >> _UNIFORM_BITS
    while _start_of(number + 1, size) <= slot:
        number += 1
    while _start_of(number, size) > slot:
        number -= 1
    start = _start_of(number, size)
    state, top = pop(state, words, top, start, _start_of(number + 1, size) - start, _UNIFORM_BITS)
    return state, top, number


@kernel
def count_symbols(contexts_N, numbers_N, counts_CS):
    """Add to int64 ``counts_CS`` the symbols of ``numbers_N`` in ``contexts_N``; contexts < 0 are skipped."""
    for n in range(len(numbers_N)):
        if contexts_N[n] >= 0:
            counts_CS[contexts_N[n], symbol_of(numbers_N[n])] += 1


@kernel
def symbols_of(numbers_N):
    """int32 [N], the symbol of each number."""
    symbols_N = np.empty(len(numbers_N), np.int32)
    for n in range(len(numbers_N)):
        symbols_N[n] = symbol_of(numbers_N[n])
    return symbols_N


def frequencies_of(counts_CS: np.ndarray) -> np.ndarray:
    """uint16 [C, ALPHABET] frequencies that add up to 2^PRECISION in every context that has any count.

    Whatever occurs gets at least 1; the rest goes by share, what rounding leaves over to the most frequent.
    """
    totals_C = counts_CS.sum(axis=1)
    scaled_CS = counts_CS * (_TOTAL / np.maximum(totals_C, 1))[:, None]
    frequencies_CS = np.where(counts_CS > 0, np.maximum(np.rint(scaled_CS), 1), 0).astype(np.int64)
    for context in np.flatnonzero(totals_C):
        row_S = frequencies_CS[context]
        while (excess := int(row_S.sum()) - _TOTAL) != 0:
            largest = int(row_S.argmax())
            row_S[largest] -= min(excess, int(row_S[largest]) - 1) if excess > 0 else excess
            if excess > 0 and row_S.max() == 1:
                raise AssertionError("an alphabet is smaller than the total of its frequencies")
    return frequencies_CS.astype(np.uint16)


def tables_of(frequencies_CS: np.ndarray) -> Tables:
    """Tables of uint16 [C, ALPHABET] frequencies.

    Raises:
        ValueError: the frequencies of a context add up neither to 2^PRECISION nor to 0.
    """
    ends_CS = np.zeros((len(frequencies_CS), ALPHABET + 1), np.int64)
    np.cumsum(frequencies_CS, axis=1, out=ends_CS[:, 1:])
    if not np.isin(ends_CS[:, -1], (0, _TOTAL)).all():
        raise ValueError(f"frequencies of a table add up to {_TOTAL}, found {ends_CS[:, -1].max()}")
    symbols_CP = np.full((len(frequencies_CS), _TOTAL), ALPHABET, np.uint8)
    for context in np.flatnonzero(ends_CS[:, -1]):
        symbols_CP[context] = np.repeat(_SYMBOLS, frequencies_CS[context])
    return Tables(ends_CS.astype(np.uint16), symbols_CP)


def code_bits(counts_CS: np.ndarray) -> float:
    """Bits that ideal tables spend on these symbols and the bits beside them; the tables are not counted."""
    totals_CS = np.maximum(counts_CS.sum(axis=1, keepdims=True), 1)
    shares_CS = np.where(counts_CS > 0, counts_CS / totals_CS, 1.0)
    extra_S = np.array([extra_bits_of(symbol) for symbol in range(ALPHABET)])
    return float(-(counts_CS * np.log2(shares_CS)).sum() + (counts_CS * extra_S).sum())
