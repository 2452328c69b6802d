"""Documents of a block to bins of one sequence each: best fit, a function of the block alone."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Piece:
    """Tokens ``begin`` to ``end`` of a block, of one document. Its first token is context only."""

    begin: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin


Bin = tuple[Piece, ...]


def cut_pieces(document_ends: np.ndarray, sequence_length: int) -> list[Piece]:
    """Every token but each document's first is charged in exactly one piece: pieces overlap by their first token.

    A sequence holds inputs; the last token of a piece is only predicted, so a piece may be one longer.

    Args:
        document_ends: int64 [D], where each document of a block ends, in tokens.
        sequence_length: input tokens of a bin.
    """
    pieces, begin = [], 0
    for end in document_ends.tolist():
        while end - begin > 1:
            stop = min(begin + sequence_length + 1, end)
            pieces.append(Piece(begin, stop))
            begin = stop - 1
        begin = end
    return pieces


def pack_bins(document_ends: np.ndarray, sequence_length: int) -> list[Bin]:
    """Pieces packed by best fit decreasing: each into the fullest bin that has room."""
    bins: list[list[Piece]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), ascending
    for piece in sorted(cut_pieces(document_ends, sequence_length), key=lambda piece: (-piece.num_tokens, piece.begin)):
        size = piece.num_tokens - 1
        fit = bisect_left(rooms, (size, -1))
        if fit == len(rooms):
            bins.append([piece])
            insort(rooms, (sequence_length - size, len(bins) - 1))
            continue
        room, target = rooms.pop(fit)
        bins[target].append(piece)
        insort(rooms, (room - size, target))
    return [tuple(pieces) for pieces in bins]
