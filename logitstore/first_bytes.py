"""The first byte of every token: of its bytes, or of what is left of them where a tokenizer normalises."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from logitstore.character_folding import significant
from logitstore.token_order import TokenTable

_CAPITALS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")


def first_bytes(*tables: TokenTable) -> list[NDArray[np.int16]]:
    """int16 [V] for each vocabulary, -1 for tokens without bytes.

    A vocabulary in which nothing begins with a space, or nothing with a capital, is of a tokenizer that drops white
    space or case: where the other side says ``" The"`` it says ``"the"``. Then tokens of all sides go by their first
    byte without white space, case and accents, as far as that leaves any.
    """
    plain = [np.array([data[0] if data else -1 for data in table], np.int16) for table in tables]
    if not any(_is_normalised(each) for each in plain):
        return plain
    return [np.array([_folded(data) if data else -1 for data in table], np.int16) for table in tables]


def _is_normalised(begins: NDArray[np.int16]) -> bool:
    found = set(begins.tolist())
    return ord(" ") not in found or not found & _CAPITALS


def _folded(data: bytes) -> int:
    try:
        text = significant(data.decode())
    except UnicodeDecodeError:
        text = ""
    return (text.encode() or data)[0]
