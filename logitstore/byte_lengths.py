"""How many bytes of a text each of its tokens covers: proven with the vocabulary's bytes, else estimated from offsets.

Shapes: T tokens of one text, V ids in the vocabulary, B bytes of all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numba
import numpy as np

from logitstore.vocabulary import AddedToken

_APART, _LSTRIP, _RSTRIP = 1, 2, 4
_SPACE = ord(" ")


class ByteTable:
    """A vocabulary's bytes, laid out to be proven on texts.

    Attributes:
        data: uint8 [B], the bytes of all tokens in the order of their ids.
        offsets: int64 [V + 1], where each token's bytes begin; the last is B.
    """

    def __init__(self, table: Sequence[bytes | None], added: Mapping[int, AddedToken]) -> None:
        """
        Args:
            table: bytes by id, None where a token has none.
            added: the added tokens by id; special ones stand for themselves where a text spells them (rendered chats).
        """
        pieces = [piece or b"" for piece in table]
        self._flags = np.zeros(len(table), dtype=np.uint8)
        for index, token in added.items():
            pieces[index] = pieces[index] or token.content.encode()
            self._flags[index] = _APART | _LSTRIP * token.lstrip | _RSTRIP * token.rstrip
        self.data = np.frombuffer(b"".join(pieces), dtype=np.uint8)
        self.offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces], dtype=np.int64)])

    def prove(self, ids: np.ndarray, text: np.ndarray) -> tuple[np.ndarray, int, int]:
        """Whether the bytes of tokens are those of a text, one after the other.

        Metaspace tokenizers put a space before a text, some also after each added token: one that the text does not
        hold is taken off the token that begins with it. Added tokens may take the white space beside them.

        Args:
            ids: int32 [T].
            text: uint8, the text's UTF-8.

        Returns:
            (byte lengths int32 [T], failed token, failed byte): the first token whose bytes are not the text's and the
            byte at which it should begin, -1 if there is none. T if the text goes on after all tokens.
        """
        lengths = np.empty(len(ids), dtype=np.int32)
        token, byte = _prove(ids, text, self.data, self.offsets, self._flags, lengths)
        return lengths, token, byte


@numba.njit(nogil=True, cache=True)
def _prove(ids, text, data, offsets, flags, lengths):  # type: ignore[no-untyped-def]
    begin = cursor = 0
    while begin < len(ids):
        end = begin + 1
        if flags[ids[begin]] & _APART:
            reached = _match_added(ids[begin], text, cursor, data, offsets, flags)
            if reached < 0:
                return begin, cursor
            lengths[begin] = reached - cursor
            cursor = reached
        else:
            while end < len(ids) and not flags[ids[end]] & _APART:
                end += 1
            failed, reached = _match_run(ids, begin, end, text, cursor, 0, data, offsets, lengths)
            if failed >= 0 and _begins_with_space(ids[begin], data, offsets):
                other, other_reached = _match_run(ids, begin, end, text, cursor, 1, data, offsets, lengths)
                if other < 0 or other > failed:
                    failed, reached = other, other_reached
            if failed >= 0:
                return failed, reached
            cursor = reached
        begin = end
    if cursor < len(text):
        return len(ids), cursor
    return -1, -1


@numba.njit(nogil=True, cache=True)
def _match_run(ids, begin, end, text, cursor, dropped, data, offsets, lengths):  # type: ignore[no-untyped-def]
    """Match ordinary tokens without the first ``dropped`` bytes of the first: (failed token or -1, byte reached)."""
    for token in range(begin, end):
        first, last = offsets[ids[token]] + dropped, offsets[ids[token] + 1]
        if first - dropped == last or cursor + last - first > len(text):
            return token, cursor
        for at in range(last - first):
            if data[first + at] != text[cursor + at]:
                return token, cursor
        lengths[token] = last - first
        cursor += last - first
        dropped = 0
    return -1, cursor


@numba.njit(nogil=True, cache=True)
def _begins_with_space(index, data, offsets):  # type: ignore[no-untyped-def]
    return offsets[index] < offsets[index + 1] and data[offsets[index]] == _SPACE


@numba.njit(nogil=True, cache=True)
def _match_added(index, text, cursor, data, offsets, flags):  # type: ignore[no-untyped-def]
    """Match an added token with the white space that it takes: the byte after it, -1 if it is not there."""
    first, size = offsets[index], offsets[index + 1] - offsets[index]
    while size:
        if cursor + size <= len(text) and np.array_equal(data[first : first + size], text[cursor : cursor + size]):
            cursor += size
            break
        white = _white_space(text, cursor) if flags[index] & _LSTRIP else 0
        if not white:
            return -1
        cursor += white
    while flags[index] & _RSTRIP:
        white = _white_space(text, cursor)
        if not white:
            break
        cursor += white
    return cursor if size else -1


@numba.njit(nogil=True, cache=True)
def _white_space(text, at):  # type: ignore[no-untyped-def]
    """Bytes of the character at a byte if it is white space to Unicode, else 0."""
    if at >= len(text):
        return 0
    if text[at] == _SPACE or 0x09 <= text[at] <= 0x0D:
        return 1
    if at + 1 < len(text) and text[at] == 0xC2:
        return 2 if text[at + 1] in (0x85, 0xA0) else 0
    if at + 2 >= len(text) or text[at] < 0xE1 or text[at] > 0xE3:
        return 0
    point = (text[at] & 0x0F) << 12 | (text[at + 1] & 0x3F) << 6 | text[at + 2] & 0x3F
    among = point in (0x1680, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000) or 0x2000 <= point <= 0x200A
    return 3 if among else 0


def lengths_from_offsets(character_ends: Sequence[int], text: str) -> np.ndarray:
    """Byte lengths int32 [T] from where each token ends in ``text``, as normalising tokenizers report it.

    Ends are made monotone, tokens that end at the same place share its bytes evenly, and the last token reaches the end
    of the text: what a normaliser drops is covered by the token after it.

    Args:
        character_ends: T positions in characters of ``text``.
    """
    if len(character_ends) == 0:
        return np.zeros(0, dtype=np.int32)
    bytes_before = np.concatenate([[0], np.cumsum(utf8_lengths(code_points(text)))])
    ends = np.maximum.accumulate(bytes_before[np.asarray(character_ends, dtype=np.int64)])
    ends[-1] = bytes_before[-1]
    unique, first, group, count = np.unique(ends, return_index=True, return_inverse=True, return_counts=True)
    begins = np.concatenate([[0], unique[:-1]])
    rank = np.arange(1, len(ends) + 1) - first[group]
    shared = begins[group] + (unique - begins)[group] * rank // count[group]
    return np.diff(shared, prepend=0).astype(np.int32)


def code_points(text: str) -> np.ndarray:
    """The characters of a text, int32."""
    return np.frombuffer(text.encode("utf-32-le"), dtype="<i4")


def utf8_lengths(points: np.ndarray) -> np.ndarray:
    """Bytes of UTF-8 of each character, int64."""
    return 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
