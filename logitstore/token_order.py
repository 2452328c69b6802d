"""A vocabulary's tokens in the order of their bytes: the longest one that some bytes begin with.

Tokens that begin alike stand together, so each byte read narrows a range of them by bisection, and the first of the
range is the one that ends there, if any does. Nothing has to be built but the order itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

TokenTable = Sequence[bytes | None]
"""Bytes of each token of a vocabulary; None for a special token or padding, which stands for no text."""


@dataclass(frozen=True)
class TokenOrder:
    """The bytes of V tokens, B in all."""

    data: NDArray[np.uint8]
    """[B] those of all tokens, by id."""
    offsets: NDArray[np.int64]
    """[V + 1] where each token's begin."""
    order: NDArray[np.int32]
    """Ids of all tokens that have bytes, by their bytes, then by rank."""

    @classmethod
    def of(cls, token_bytes: TokenTable, fallback_ids: Collection[int] = ()) -> TokenOrder:
        """Lay out a vocabulary.

        Args:
            token_bytes: [V].
            fallback_ids: tokens that texts hold only where no other has their bytes: of several with the same bytes
                they rank last. The others rank by id.
        """
        pieces = [piece or b"" for piece in token_bytes]
        data = np.frombuffer(b"".join(pieces), np.uint8)
        offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces], dtype=np.int64)]).astype(np.int64)
        last = frozenset(fallback_ids)
        # Sorting is stable, so what comes first stays first of those with the same bytes.
        ranked = sorted((token for token, piece in enumerate(pieces) if piece), key=last.__contains__)
        order = sorted(ranked, key=pieces.__getitem__)
        return cls(data, offsets, np.array(order, np.int32))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[V] bytes of each token."""
        return np.diff(self.offsets)


@numba.njit(nogil=True, cache=True)
def longest_prefix(data, offsets, order, text, begin, end):  # type: ignore[no-untyped-def]
    """Longest token that ``text[begin:end]`` begins with, the first in rank of its bytes; -1 if none."""
    low, high, longest = 0, len(order), -1
    for depth in range(end - begin):
        byte = text[begin + depth]
        low = _first_at(data, offsets, order, low, high, depth, byte)
        high = _first_at(data, offsets, order, low, high, depth, byte + 1)
        if low == high:
            break
        token = order[low]
        if offsets[token + 1] - offsets[token] == depth + 1:
            longest = token
    return longest


@numba.njit(nogil=True, cache=True)
def _first_at(data, offsets, order, low, high, depth, byte):  # type: ignore[no-untyped-def]
    """First place in ``order[low:high]`` whose token has a byte >= ``byte`` at ``depth``; ended tokens come before."""
    while low < high:
        middle = (low + high) // 2
        place = offsets[order[middle]] + depth
        if place >= offsets[order[middle] + 1] or data[place] < byte:
            low = middle + 1
        else:
            high = middle
    return low
