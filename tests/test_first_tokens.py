"""The first token, in another vocabulary, of each token of one."""

from __future__ import annotations

from logitstore.first_tokens import first_tokens


def test_first_tokens_takes_the_longest_prefix() -> None:
    other = [b"a", b"ab", None, b"abc", b"a", b""]
    tokens = [b"abd", b"abcd", b"a", b"x", None, b""]
    assert first_tokens(tokens, other).tolist() == [1, 3, 0, -1, -1, -1]


def test_first_tokens_believes_the_tokenizer_only_where_it_can() -> None:
    other = [b"a", b"ab", b"\xc3", b"\xc3\xa9", b" ", None]
    answers = {"ab": [0, 1], "é": [3], "a": [4, 0], "b": [5], "ax": []}
    tokens = [b"ab", "é".encode(), b"\xc3", b"a", b"b", b"ax"]
    # "ab" is cut as the tokenizer cuts it; a lone byte is no text; a space in front, a special token and an empty
    # answer are not believed.
    assert first_tokens(tokens, other, answers.__getitem__).tolist() == [0, 3, 2, 0, -1, 0]
