"""The first token, in another vocabulary, of each token of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

TokenTable = Sequence[bytes | None]
"""Bytes of each token of a vocabulary; None for a special token or padding, which stands for no text."""


def first_tokens(
    token_bytes: TokenTable,
    other_bytes: TokenTable,
    encode: Callable[[str], Sequence[int]] | None = None,
) -> NDArray[np.int64]:
    """First token, in another vocabulary, of each token's bytes tokenised by themselves.

    The other tokenizer's own answer is taken where there is one: where the bytes are UTF-8 and what it returns is a
    prefix of them (a tokenizer that adds a space or normalises is not believed). Otherwise it is the longest token of
    the other vocabulary that is a prefix of the bytes.

    Args:
        token_bytes: [V] the tokens to cut.
        other_bytes: [V_other] the vocabulary to cut them with.
        encode: text to ids of the other vocabulary, without special tokens; None to use longest prefixes throughout.

    Returns:
        [V] ids in the other vocabulary; -1 for tokens without bytes, or whose first byte no token begins with.
    """
    table: dict[bytes, int] = {}
    for token, value in enumerate(other_bytes):
        if value:
            table.setdefault(value, token)
    longest = max(map(len, table), default=0)
    first = np.full(len(token_bytes), -1, np.int64)
    for token, value in enumerate(token_bytes):
        if not value:
            continue
        answer = -1 if encode is None else _first_encoded(value, other_bytes, encode)
        first[token] = answer if answer >= 0 else _longest_prefix(value, table, longest)
    return first


def _first_encoded(value: bytes, other_bytes: TokenTable, encode: Callable[[str], Sequence[int]]) -> int:
    """The tokenizer's own first token of these bytes, or -1 if it has none that is a prefix of them."""
    try:
        ids = encode(value.decode())
    except UnicodeDecodeError:
        return -1
    begin = other_bytes[ids[0]] if ids and ids[0] < len(other_bytes) else None
    return int(ids[0]) if begin and value.startswith(begin) else -1


def _longest_prefix(value: bytes, table: dict[bytes, int], longest: int) -> int:
    for length in range(min(len(value), longest), 0, -1):
        if (token := table.get(value[:length])) is not None:
            return token
    return -1
