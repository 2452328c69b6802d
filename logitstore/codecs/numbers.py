"""Sequences of whole numbers, each in a context that the decoder knows, as bytes of a static entropy code.

uint32 num_contexts, bytes of the tables, words, state (2 words)      little-endian
tables     zstd: uint16 [num_contexts, ALPHABET] frequencies
words      uint32
"""

from __future__ import annotations

import struct

import numpy as np
from numcodecs.zstd import Zstd

from logitstore.codecs.rans import (
    ALPHABET,
    INITIAL_STATE,
    Tables,
    count_symbols,
    frequencies_of,
    kernel,
    pop_number,
    push_number,
    tables_of,
)
from logitstore.errors import DamageError
from logitstore.sharding import zstd_content_size

_HEADER = struct.Struct("<3IQ")
_ZSTD = Zstd(level=9)
MAX_CONTEXTS = 4096


def encode_numbers(numbers_N: np.ndarray, contexts_N: np.ndarray, num_contexts: int) -> bytes:
    """Encode int64 [N] numbers, 0 <= number < 2^31, in contexts int32 [N], each < num_contexts."""
    counts_CS = np.zeros((num_contexts, ALPHABET), np.int64)
    count_symbols(contexts_N, numbers_N, counts_CS)
    frequencies_CS = frequencies_of(counts_CS)
    words = np.empty(2 * len(numbers_N) + 2, np.uint32)
    state, top = _push_all(numbers_N, contexts_N, tables_of(frequencies_CS).ends, words)
    packed = pack_tables(frequencies_CS)
    return _HEADER.pack(num_contexts, len(packed), top, state) + packed + words[:top].astype("<u4").tobytes()


class NumberReader:
    """Reads the numbers back, some at a time, because the context of one may hang on another."""

    def __init__(self, data: memoryview, what: str) -> None:
        """Args: data: begins with what ``encode_numbers`` returned; what: for messages.

        Raises:
            DamageError: ``data`` is not of that form.
        """
        self._what = what
        if len(data) < _HEADER.size:
            raise DamageError(f"{what}: a header of {_HEADER.size} bytes was expected, found {len(data)}")
        num_contexts, table_bytes, num_words, state = _HEADER.unpack(data[: _HEADER.size])
        self.num_bytes = _HEADER.size + table_bytes + 4 * num_words
        if (
            num_contexts > MAX_CONTEXTS
            or self.num_bytes > len(data)
            or not INITIAL_STATE <= state < INITIAL_STATE << 32
        ):
            raise DamageError(
                f"{what}: {self.num_bytes} bytes are declared, found {len(data)}, or no state of the coder"
            )
        tables_end = _HEADER.size + table_bytes
        frequencies_CS = unpack_frequencies(data[_HEADER.size : tables_end], num_contexts, what)
        # Most contexts are of no use to most sequences: tables are made for those that are, and an empty one.
        used = np.flatnonzero(frequencies_CS.any(axis=1))
        self._table_of = np.full(num_contexts, len(used), np.int32)
        self._table_of[used] = np.arange(len(used))
        self._tables = checked_tables(np.concatenate([frequencies_CS[used], np.zeros((1, ALPHABET), np.uint16)]), what)
        self._words = np.frombuffer(data[tables_end : self.num_bytes], "<u4")
        self._state, self._top = np.uint64(state), num_words

    def read(self, contexts_N: np.ndarray) -> np.ndarray:
        """The next int64 [N] numbers, in contexts int32 [N].

        Raises:
            DamageError: there are no such numbers.
        """
        if contexts_N.max(initial=0) >= len(self._table_of):
            raise DamageError(f"{self._what}: a context without a table")
        numbers_N = np.empty(len(contexts_N), np.int64)
        tables_N = self._table_of[contexts_N]
        self._state, self._top = _pop_all(tables_N, *self._tables, self._words, self._state, self._top, numbers_N)
        if self._top < 0:
            raise DamageError(f"{self._what}: ends too early")
        return numbers_N

    def finish(self) -> None:
        """Raises DamageError unless all was read: every push was undone, so the first state is back."""
        if self._top != 0 or self._state != INITIAL_STATE:
            raise DamageError(f"{self._what}: holds more than was declared")


def pack_tables(frequencies_CS: np.ndarray) -> bytes:
    """Frequencies as bytes."""
    return bytes(_ZSTD.encode(np.ascontiguousarray(frequencies_CS.astype("<u2"))))


def unpack_frequencies(data: memoryview, num_contexts: int, what: str) -> np.ndarray:
    """The inverse of ``pack_tables``: uint16 [num_contexts, ALPHABET].

    Raises:
        DamageError: the bytes are not such an array.
    """
    decoded, packed = np.zeros((num_contexts, ALPHABET), "<u2"), bytes(data)
    if zstd_content_size(packed) != decoded.nbytes:
        raise DamageError(f"{what}: tables: a frame of {decoded.nbytes} bytes was expected")
    try:
        _ZSTD.decode(packed, out=decoded)
    except (RuntimeError, ValueError) as error:
        raise DamageError(f"{what}: tables: {error}") from error
    return decoded


def checked_tables(frequencies_CS: np.ndarray, what: str) -> Tables:
    """Tables of frequencies that were read. Raises DamageError where they do not add up."""
    try:
        return tables_of(frequencies_CS)
    except ValueError as error:
        raise DamageError(f"{what}: {error}") from error


@kernel
def _push_all(numbers_N, contexts_N, ends_CS, words):
    state, top = np.uint64(INITIAL_STATE), 0
    for n in range(len(numbers_N) - 1, -1, -1):
        state, top = push_number(state, words, top, ends_CS, contexts_N[n], numbers_N[n])
    return state, top


@kernel
def _pop_all(contexts_N, ends_CS, symbols_CP, words, state, top, numbers_N):
    for n in range(len(contexts_N)):
        state, top, numbers_N[n] = pop_number(state, words, top, ends_CS, symbols_CP, contexts_N[n])
        if top < 0:
            break
    return state, top
