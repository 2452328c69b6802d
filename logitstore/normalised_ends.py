"""Byte ends of tokens whose bytes are not the text's, because the tokenizer normalises: by their folded characters.

A token ends after the last character of the text that it matched. What nobody matched belongs to the token after it
(spaces that are dropped) or, a mark, to its base (accents that are dropped); the end of the text to the last token.
Tokens that share one character (two tokens of what a normaliser makes of it) end together, unless it is itself in the
tokens: then they end in it as their bytes do. So do tokens between which no place of the text is right: where one
begins within a character and reaches beyond it, or among marks that the normaliser has sorted or composed.

Shapes: T tokens, N characters of the text, C characters of the tokens, S symbols of the text, M symbols of the tokens,
V ids.
"""

from __future__ import annotations

import numba
import numpy as np

from logitstore.byte_lengths import code_points
from logitstore.character_folding import FOLDS, MARK
from logitstore.symbol_alignment import FAILED, UNKNOWN_TOKEN, align_symbols


class FoldedTable:
    """A vocabulary's bytes, laid out to be matched with normalised texts."""

    def __init__(self, data: np.ndarray, offsets: np.ndarray, unknown: np.ndarray) -> None:
        """
        Args:
            data: uint8, the bytes of all tokens in the order of their ids.
            offsets: int64 [V + 1], where each token's bytes begin.
            unknown: bool [V], tokens that stand for whatever the vocabulary cannot spell.
        """
        self._data, self._offsets, self._unknown = data, offsets, unknown
        points = np.unique(code_points(data.tobytes().decode("utf-8", "ignore")))
        FOLDS.learn(points)
        symbols, _ = _fold(points, FOLDS.symbol, FOLDS.several, FOLDS.bounds)
        self._in_vocabulary = np.zeros(len(FOLDS.kind), dtype=np.bool_)
        self._in_vocabulary[symbols] = True

    def prove(self, ids: np.ndarray, text: str) -> np.ndarray | None:
        """Byte lengths int32 [T] of the tokens ``ids`` (int32 [T]) of ``text``; None if they are not proven."""
        points_N = code_points(text)
        points_C, ends_T, inside_T = _spell(ids, self._data, self._offsets, self._unknown)
        if len(ids) == 0 or len(inside_T) == 0:
            return None
        FOLDS.learn(points_N)
        FOLDS.learn(points_C)
        table = FOLDS.symbol, FOLDS.several, FOLDS.bounds
        symbols_S, begins_N = _fold(points_N, *table)
        symbols_M, begins_C = _fold(points_C, *table)
        covers_M, cost = align_symbols(symbols_S, symbols_M, FOLDS.kind, self._in_vocabulary)
        if cost == FAILED:
            return None
        return _lengths(points_N, begins_N, points_C, begins_C, covers_M, ends_T, inside_T, FOLDS.kind)


@numba.njit(nogil=True, cache=True)
def _fold(points, symbol, several, bounds):  # type: ignore[no-untyped-def]
    """The symbols of characters, int32 [S], and where each character's begin, int64 [N + 1]."""
    begins = np.zeros(len(points) + 1, np.int64)
    for n in range(len(points)):
        found = UNKNOWN_TOKEN if points[n] == UNKNOWN_TOKEN else symbol[points[n]]
        is_one = found >= 0 or points[n] == UNKNOWN_TOKEN
        begins[n + 1] = begins[n] + (1 if is_one else bounds[-1 - found] - bounds[-2 - found])
    symbols = np.empty(begins[-1], np.int32)
    for n in range(len(points)):
        found = UNKNOWN_TOKEN if points[n] == UNKNOWN_TOKEN else symbol[points[n]]
        if found >= 0 or points[n] == UNKNOWN_TOKEN:
            symbols[begins[n]] = found
        else:
            symbols[begins[n] : begins[n + 1]] = several[bounds[-2 - found] : bounds[-1 - found]]
    return symbols, begins


@numba.njit(nogil=True, cache=True)
def _spell(ids, data, offsets, unknown):  # type: ignore[no-untyped-def]
    """The characters of tokens, joined.

    Returns:
        (code points int32 [C], ``UNKNOWN_TOKEN`` for an unknown token; the characters that are whole where each token
        ends, int64 [T]; and the bytes of one more that it has, int8 [T]). The last is empty if the bytes are not UTF-8.
    """
    size = 0
    for index in ids:
        size += max(offsets[index + 1] - offsets[index], 1)
    points, ends, inside = np.empty(size, np.int32), np.empty(len(ids), np.int64), np.empty(len(ids), np.int8)
    count = pending = have = 0
    point = np.int32(0)
    for token in range(len(ids)):
        index = ids[token]
        if unknown[index] or offsets[index] == offsets[index + 1]:
            if pending:
                return points[:0], ends, inside[:0]
            points[count] = UNKNOWN_TOKEN
            count += 1
        else:
            for at in range(offsets[index], offsets[index + 1]):
                byte = np.int32(data[at])
                if pending == 0:
                    have = 1
                    pending = 0 if byte < 0x80 else 1 if byte < 0xE0 else 2 if byte < 0xF0 else 3
                    point = byte if byte < 0x80 else byte & (0x3F >> pending)
                    if 0x80 <= byte < 0xC2 or byte > 0xF4:
                        return points[:0], ends, inside[:0]
                else:
                    if byte & 0xC0 != 0x80:
                        return points[:0], ends, inside[:0]
                    point = point << 6 | byte & 0x3F
                    pending -= 1
                    have += 1
                if pending == 0:
                    if point > 0x10FFFF:
                        return points[:0], ends, inside[:0]
                    points[count] = point
                    count += 1
        ends[token], inside[token] = count, have if pending else 0
    if pending:
        return points[:0], ends, inside[:0]
    return points[:count], ends, inside


@numba.njit(nogil=True, cache=True)
def _lengths(  # type: ignore[no-untyped-def]
    points, text_begins, token_points, token_begins, covers, token_ends, inside, kind
):
    """Byte lengths int32 [T], from the symbols of the text that the tokens' symbols cover [M]."""
    byte, character = _places(points, text_begins)
    covered, stops = _covered(points, character, token_points, token_begins, covers, kind)
    reached = np.empty(len(token_ends), np.int64)
    is_clean = np.ones(len(token_ends), np.bool_)
    symbol = end = 0
    for token in range(len(token_ends)):
        while symbol < token_begins[token_ends[token]]:
            if covers[symbol] >= 0:
                end = max(end, character[covers[symbol]] + 1)
            symbol += 1
        is_clean[token] = not _goes_on(symbol, token, end - 1, covers, character, token_begins, token_ends)
        while 0 < end < len(points) and not covered[end] and kind[points[end]] == MARK:
            end += 1
        is_clean[token] &= stops[end]
        reached[token] = byte[end]
        if inside[token] and covers[symbol] >= 0:
            whole = character[covers[symbol]]
            if points[whole] == token_points[token_ends[token]]:
                reached[token] = byte[whole] + inside[token]
            else:
                end = max(end, whole + 1)
                reached[token] = byte[end]
    reached[-1] = byte[-1]
    for token in range(len(token_ends) - 2, -1, -1):
        if not is_clean[token]:
            reached[token] = reached[token + 1]
    lengths = np.empty(len(token_ends), np.int32)
    before = 0
    for token in range(len(token_ends)):
        lengths[token] = reached[token] - before
        before = reached[token]
    return lengths


@numba.njit(nogil=True, cache=True)
def _covered(points, character, token_points, token_begins, covers, kind):  # type: ignore[no-untyped-def]
    """Which characters of the text tokens cover, bool [N], and where tokens may end, bool [N + 1].

    Not among a letter and its marks unless all of them stand in the tokens as they are: normalisers sort and compose
    marks, so that what is in two tokens need not be what is before and after any mark.
    """
    covered, is_same = np.zeros(len(points), np.bool_), np.zeros(len(points), np.bool_)
    for index in range(len(token_points)):
        for symbol in range(token_begins[index], token_begins[index + 1]):
            if covers[symbol] >= 0:
                n = character[covers[symbol]]
                covered[n] = True
                is_same[n] |= token_points[index] == points[n] or token_points[index] == UNKNOWN_TOKEN
    stops = np.ones(len(points) + 1, np.bool_)
    begin = 0
    for n in range(1, len(points) + 1):
        if n == len(points) or kind[points[n]] != MARK:
            if n > begin + 1:
                stops[begin + 1 : n] = np.all(is_same[begin:n])
            begin = n
    return covered, stops


@numba.njit(nogil=True, cache=True)
def _goes_on(symbol, token, last, covers, character, token_begins, token_ends):  # type: ignore[no-untyped-def]
    """Whether a token that begins within the character ``last``, where ``token`` ends, reaches beyond it.

    "ำ" is normalised to two characters, of which the second may begin a word.
    """
    shares = False
    for following in range(token + 1, len(token_ends)):
        while symbol < token_begins[token_ends[following]]:
            if covers[symbol] >= 0:
                if character[covers[symbol]] > last:
                    return shares
                shares = True
            symbol += 1
        if not shares:
            return False
    return False


@numba.njit(nogil=True, cache=True)
def _places(points, begins):  # type: ignore[no-untyped-def]
    """The byte at which each character begins, and its end [N + 1]; the character that each symbol is of [S]."""
    byte, character = np.zeros(len(points) + 1, np.int64), np.empty(begins[-1], np.int64)
    for n in range(len(points)):
        point = points[n]
        byte[n + 1] = byte[n] + 1 + (point >= 0x80) + (point >= 0x800) + (point >= 0x10000)
        character[begins[n] : begins[n + 1]] = n
    return byte, character
