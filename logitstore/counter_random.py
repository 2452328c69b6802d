"""Random numbers that are a function of what they are for: no state, the same on every worker, in any order."""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform_words(seed: int, document_digests: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """uint64 [T] uniform words, one a row, keyed by (seed, document, position).

    Each step is SplitMix64's finaliser, a bijection of 64 bits (Steele, Lea, Flood 2014), over a Weyl sequence.

    Args:
        seed: of the recipe.
        document_digests: uint64 [T], 64 bits of each row's document digest.
        positions: int64 [T], the row's position within its document.
    """
    state = _mix(np.full(len(positions), seed, np.uint64) + _GOLDEN)
    state = _mix(state ^ document_digests)
    return _mix(state + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def _mix(words: np.ndarray) -> np.ndarray:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
