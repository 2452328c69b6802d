"""Every token of a vocabulary as weighted tokens of another: a sparse matrix, its rows the pieces of each token.

A token that another tokenizer cuts into pieces stands mostly for the first of them, which is what the other model has
to predict in its place. Weights fall by a factor of ten from piece to piece and sum to one: 1; .909, .091; .901, .090,
.009; of more pieces the first four (X-Token, arXiv 2605.21699).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_DECAY = 0.1


@dataclass(frozen=True)
class TokenProjection:
    """Rows [V] of a sparse matrix [V, V_other], as CSR; row v is at ``indptr[v]`` to ``indptr[v + 1]``."""

    indptr: NDArray[np.int64]
    """[V + 1]."""
    ids: NDArray[np.int32]
    """Tokens of the other vocabulary, distinct within a row, the heaviest first."""
    weights: NDArray[np.float32]
    """They sum to 1 in each row that has any; tokens that stand for nothing on the other side have none."""


def project_pieces(pieces: NDArray[np.int32]) -> TokenProjection:
    """The projection of tokens to their pieces.

    Args:
        pieces: [V, P] in their order, -1 after the last.
    """
    is_piece = pieces >= 0
    weights = np.where(is_piece, _DECAY ** np.arange(pieces.shape[1]), 0.0)
    weights /= np.maximum(weights.sum(axis=1, keepdims=True), _DECAY ** pieces.shape[1])
    kept = is_piece.copy()
    # A piece that comes again, as in a run of spaces, adds its weight to where it stands first.
    for later in range(1, pieces.shape[1]):
        for first in range(later):
            repeats = is_piece[:, later] & kept[:, later] & (pieces[:, later] == pieces[:, first])
            weights[repeats, first] += weights[repeats, later]
            kept[repeats, later] = False
    indptr = np.concatenate([[0], np.cumsum(kept.sum(axis=1))]).astype(np.int64)
    return TokenProjection(indptr, pieces[kept], weights[kept].astype(np.float32))
