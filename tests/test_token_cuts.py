"""How one tokenizer cuts the tokens of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from builders import build_bytelevel_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from logitstore.token_cuts import MAX_PIECES, cut_tokens
from logitstore.token_order import TokenTable
from logitstore.tokenizer import Tokenizer


def encoder(answers: dict[str, list[int]]) -> Callable[[Sequence[str]], list[list[int]]]:
    return lambda texts: [answers.get(text, []) for text in texts]


def reference_cut(value: bytes | None, other: TokenTable) -> list[int]:
    """Longest prefixes over and over, the slow way."""
    pieces, rest = [], value or b""
    while rest and len(pieces) < MAX_PIECES:
        found = [(-len(token), n) for n, token in enumerate(other) if token and rest.startswith(token)]
        if not found:
            break
        pieces.append(min(found)[1])
        rest = rest[-min(found)[0] :]
    return pieces


def test_cut_tokens_takes_the_longest_prefix() -> None:
    other = [b"a", b"ab", None, b"abc", b"a", b""]
    tokens = [b"abd", b"abcd", b"a", b"x", None, b""]
    assert cut_tokens(tokens, other).first.tolist() == [1, 3, 0, -1, -1, -1]


def test_cut_tokens_believes_the_tokenizer_only_where_it_can() -> None:
    other = [b"a", b"ab", b"\xc3", b"\xc3\xa9", b" ", None]
    answers = {"ab": [0, 1], "é": [3], "a": [4, 0], "b": [5], "ax": [], "aab": [0, 1]}
    tokens = [b"ab", "é".encode(), b"\xc3", b"a", b"b", b"ax", b"aab"]
    # "ab" begins as the tokenizer cuts it; a lone byte is no text; a space in front, a special token and an empty
    # answer are not believed.
    cuts = cut_tokens(tokens, other, encoder(answers))
    assert cuts.first.tolist() == [0, 3, 2, 0, -1, 0, 0]
    assert cuts.pieces[6].tolist() == [0, 1, -1, -1]


def test_cut_tokens_keeps_four_pieces() -> None:
    assert cut_tokens([b"aaaaaa"], [b"a"]).pieces.tolist() == [[0, 0, 0, 0]]
    assert cut_tokens([b"aaaaaa"], [b"a"], encoder({"aaaaaa": [0] * 6})).pieces.tolist() == [[0, 0, 0, 0]]


def test_cut_tokens_believes_a_tokenizer_that_normalises_where_no_token_begins_so() -> None:
    other = [b"the", b"cafe", b"[UNK]", b"x"]
    answers = {" the": [0], "Café": [1], "é": [2], "xé": [3], "The": [0]}
    tokens = [b" the", "Café".encode(), "é".encode(), "xé".encode(), b" x"]
    assert cut_tokens(tokens, other, encoder(answers)).first.tolist() == [0, 1, -1, 3, -1]


def test_cut_tokens_gives_words_without_their_space_to_tokenizers_that_add_one() -> None:
    other = [b"  a", b" list", b" li", b"st", b"  li", b" "]
    answers = {" a": [0], "list": [2, 3], " list": [4, 3], "": [5]}
    # Its own cut of " list" within a text is that of "list", to which it puts a space; "list" alone it cannot say.
    cuts = cut_tokens([b" list", b"  list", b"list", b" "], other, encoder(answers))
    assert cuts.pieces[:, :2].tolist() == [[2, 3], [4, 3], [2, 3], [5, -1]]


def test_cut_tokens_of_ones_own_vocabulary_are_whole(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(build_bytelevel_tokenizer(tmp_path))
    cuts = cut_tokens(tokenizer.token_bytes, tokenizer.token_bytes)
    has_bytes = np.array([bool(value) for value in tokenizer.token_bytes])
    assert cuts.first[has_bytes].tolist() == np.flatnonzero(has_bytes).tolist()
    assert (cuts.pieces[:, 1:] == -1).all()


tables = st.lists(st.none() | st.binary(max_size=5) | st.text("ab \xff", max_size=5).map(str.encode), max_size=20)


@given(tables, tables)
@settings(max_examples=300, deadline=None)
def test_cut_tokens_is_longest_prefixes(tokens: list[bytes | None], other: list[bytes | None]) -> None:
    pieces = cut_tokens(tokens, other).pieces
    for value, row in zip(tokens, pieces.tolist(), strict=True):
        expected = reference_cut(value, other)
        assert row == expected + [-1] * (MAX_PIECES - len(expected))


@pytest.mark.parametrize("ids", [[7], [-1], [0, 9]])
def test_cut_tokens_ignores_ids_outside_the_vocabulary(ids: list[int]) -> None:
    assert cut_tokens([b"ab"], [b"ab"], encoder({"ab": ids})).first.tolist() == [0]
