"""How one tokenizer cuts the tokens of another: the pieces of each token's bytes, cut by themselves.

The other tokenizer's own answer is taken where it can be believed: where the bytes are UTF-8 and what it returns are
these bytes. Otherwise the longest token of its vocabulary that the bytes begin with comes first, then the longest for
what is left, and so on. Where no token begins so, as words after a space do in WordPiece vocabularies, the answer of a
tokenizer that normalises is taken if it spells the same but for case, accents and white space.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain

import numba
import numpy as np
from numpy.typing import NDArray

from logitstore.character_folding import significant
from logitstore.token_order import TokenOrder, TokenTable, longest_prefix

MAX_PIECES = 4
"""Pieces of a token that are kept: the first ones."""

EncodeTexts = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""Texts to ids, each by itself and without special tokens."""


@dataclass(frozen=True)
class TokenCuts:
    """V tokens cut with another vocabulary."""

    pieces: NDArray[np.int32]
    """[V, MAX_PIECES] ids of the other vocabulary in their order, -1 after the last."""

    @property
    def first(self) -> NDArray[np.int32]:
        """[V] first piece; -1 for tokens without bytes, or whose first byte no token begins with."""
        return self.pieces[:, 0]


def cut_tokens(
    token_bytes: TokenTable,
    other_bytes: TokenTable,
    encode: EncodeTexts | None = None,
    other_fallback_ids: Collection[int] = (),
) -> TokenCuts:
    """Cut every token of a vocabulary with another one.

    Args:
        token_bytes: [V] the tokens to cut.
        other_bytes: [V_other] the vocabulary to cut them with.
        encode: by the other tokenizer; None to use longest prefixes throughout.
        other_fallback_ids: of the other vocabulary, see ``TokenOrder.of``.
    """
    tokens, others = TokenOrder.of(token_bytes), TokenOrder.of(other_bytes, other_fallback_ids)
    answers, ends = _answers(token_bytes, other_bytes, encode)
    pieces = np.full((len(token_bytes), MAX_PIECES), -1, np.int32)
    _cut(tokens.data, tokens.offsets, others.data, others.offsets, others.order, answers, ends, pieces)
    _add_normalised(token_bytes, other_bytes, answers, ends, pieces)
    return TokenCuts(pieces)


def _answers(
    token_bytes: TokenTable, other_bytes: TokenTable, encode: EncodeTexts | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tokenizer's ids for each token, one after the other, and where each token's end, [V]; none where unknown."""
    counts = np.zeros(len(token_bytes), np.int64)
    if encode is None:
        return np.zeros(0, np.int64), counts
    texts = {token: text for token, value in enumerate(token_bytes) if value and (text := _text_of(value)) is not None}
    if _spell(encode([" a"])[0], other_bytes) == b"  a":
        # It puts a space before every text, so those that begin with one are given without: as after a word.
        texts = {token: text.removeprefix(" ") for token, text in texts.items()}
    ids = encode(list(texts.values()))
    counts[list(texts)] = [len(each) for each in ids]
    flat = np.fromiter(chain.from_iterable(ids), np.int64)
    return np.where(flat < len(other_bytes), flat, -1), np.cumsum(counts)


def _text_of(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _spell(ids: Sequence[int], token_bytes: TokenTable) -> bytes | None:
    """The bytes of some tokens, one after the other; None if one has none."""
    spelled = [token_bytes[index] if 0 <= index < len(token_bytes) else None for index in ids]
    return None if None in spelled else b"".join(piece for piece in spelled if piece)


@numba.njit(nogil=True, cache=True)
def _cut(data, offsets, other_data, other_offsets, other_order, answers, ends, pieces):  # type: ignore[no-untyped-def]
    """Fill ``pieces`` with what can be believed of the answers, then with longest prefixes of what is left."""
    for token in range(len(pieces)):
        place, end = offsets[token], offsets[token + 1]
        begin_answer, end_answer = ends[token - 1] if token > 0 else 0, ends[token]
        believed = num_pieces = 0
        if place < end and begin_answer < end_answer:
            believed = _num_believed(data, place, end, other_data, other_offsets, answers[begin_answer:end_answer])
        for piece in answers[begin_answer : begin_answer + min(believed, pieces.shape[1])]:
            pieces[token, num_pieces] = piece
            num_pieces += 1
            place += other_offsets[piece + 1] - other_offsets[piece]
        while place < end and num_pieces < pieces.shape[1]:
            piece = longest_prefix(other_data, other_offsets, other_order, data, place, end)
            if piece < 0:
                break
            pieces[token, num_pieces] = piece
            num_pieces += 1
            place += other_offsets[piece + 1] - other_offsets[piece]


@numba.njit(nogil=True, cache=True)
def _num_believed(data, place, end, other_data, other_offsets, answer):  # type: ignore[no-untyped-def]
    """All pieces of an answer if they spell the token, else the first if the token begins with it, else none."""
    num_matched = 0
    for piece in answer:
        if piece < 0:
            break
        begin, stop = other_offsets[piece], other_offsets[piece + 1]
        size = stop - begin
        if size == 0 or size > end - place or not np.array_equal(other_data[begin:stop], data[place : place + size]):
            break
        place += size
        num_matched += 1
    return num_matched if num_matched == len(answer) and place == end else min(num_matched, 1)


def _add_normalised(
    token_bytes: TokenTable,
    other_bytes: TokenTable,
    answers: NDArray[np.int64],
    ends: NDArray[np.int64],
    pieces: NDArray[np.int32],
) -> None:
    """Fill in the answers that spell the same text otherwise, where no token of the other vocabulary begins so."""
    counts = np.diff(ends, prepend=0)
    for token in np.flatnonzero((pieces[:, 0] < 0) & (counts > 0)).tolist():
        answer = answers[ends[token] - counts[token] : ends[token]].tolist()
        spelled, value = _spell(answer, other_bytes), token_bytes[token]
        text = None if spelled is None else _text_of(spelled)
        if (
            text is not None
            and value is not None
            and (folded := significant(text))
            and folded == significant(value.decode())
        ):
            pieces[token, : min(len(answer), MAX_PIECES)] = answer[:MAX_PIECES]
