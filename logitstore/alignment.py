"""Alignment of two tokenisations of the same documents: which tokens begin at the same place.

Both sides cut the same bytes, so their boundaries are two sorted lists, and the alignment is the intersection: linear
and exact. It is kept as a bit per token and side; the k-th set bit of one side pairs with the k-th of the other.

Tokens with bytes begin at a byte, and pair where a token of the other side begins at the same one. Of those without
(BOS, EOS, what a chat template writes), only *closers* have a place that both sides know: an end of turn or EOS
directly after a token with bytes. They pair at the same byte, whatever they are called; other tokens of a template
never do.

A document whose byte lengths are not proven on both sides shares nothing: a wrong pair is worse than none.

Shapes: Ta, Tb tokens of the sides a (the teacher's) and b (the student's), D documents, P pairs, S spans.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numba
import numpy as np

from logitstore.errors import StoreError

if TYPE_CHECKING:
    from logitstore.token_parts import TokenBlock

_ALIGNED = -1


@dataclass(frozen=True)
class AlignmentStatistics:
    """Counts over the documents of an alignment; those of several blocks add up."""

    num_spans: int = 0
    """Stretches from one shared beginning to the next: tokens with bytes that begin together."""
    num_one_to_one: int = 0
    """Spans that are one token on either side."""
    num_content_tokens: int = 0
    """Tokens of b with bytes."""
    num_covered: int = 0
    """Those of them that lie in a span: all of a document whose byte lengths are proven on both sides."""
    num_unproven_documents: int = 0
    """Documents that are not, and share nothing."""

    @property
    def coverage(self) -> float:
        """Share of b's tokens with bytes that are covered, in 0..1; 1 if there are none."""
        return self.num_covered / self.num_content_tokens if self.num_content_tokens else 1.0

    @property
    def num_unproven_tokens(self) -> int:
        """Tokens of b with bytes in documents that share nothing."""
        return self.num_content_tokens - self.num_covered

    def __add__(self, other: AlignmentStatistics) -> AlignmentStatistics:
        names = [field.name for field in fields(self)]
        return AlignmentStatistics(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclass(frozen=True)
class Alignment:
    """Shared beginnings of two tokenisations of a block.

    Attributes:
        shared_a: bool [Ta].
        shared_b: bool [Tb], as many set as in ``shared_a``.
        statistics: what the alignment covers.
    """

    shared_a: np.ndarray
    shared_b: np.ndarray
    statistics: AlignmentStatistics

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Indices int64 [P] of the tokens of a, and of those of b that begin at the same places, closers included."""
        return np.flatnonzero(self.shared_a), np.flatnonzero(self.shared_b)


@dataclass(frozen=True)
class Spans:
    """Stretches of tokens that cover the same bytes on both sides and cannot be cut shorter.

    Attributes:
        a: int64 [S, 2], where each begins and ends among the tokens of a. Tokens without bytes belong to it only where
            they lie inside.
        b: int64 [S, 2], likewise.
    """

    a: np.ndarray
    b: np.ndarray

    @classmethod
    def between(cls, a: TokenBlock, shared_a: np.ndarray, b: TokenBlock, shared_b: np.ndarray) -> Spans:
        """From the stored bits [Ta], [Tb] and the tokens that they are of."""
        sides = ((a, shared_a), (b, shared_b))
        return cls(*(_spans_of(side.byte_lengths, side.ends, shared) for side, shared in sides))

    def __len__(self) -> int:
        return len(self.a)

    def one_to_one(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int64 [P] of a and of b that cover the very same bytes."""
        single = (np.diff(self.a) == 1)[:, 0] & (np.diff(self.b) == 1)[:, 0]
        return self.a[single, 0], self.b[single, 0]

    @property
    def longest(self) -> int:
        """Tokens, of either side, of the span that has most."""
        return max(int(np.diff(side).max(initial=0)) for side in (self.a, self.b))


def align(
    a: TokenBlock, b: TokenBlock, closing_ids_a: Collection[int] = (), closing_ids_b: Collection[int] = ()
) -> Alignment:
    """Align two tokenisations of the same documents.

    Args:
        a: the teacher's side.
        b: the student's.
        closing_ids_a: ids that end a turn or a text on side a.
        closing_ids_b: likewise.

    Raises:
        StoreError: the sides are not of the same documents: their numbers, or the bytes of one, differ.
    """
    if len(a.ends) != len(b.ends):
        raise StoreError(f"alignment: {len(a.ends)} documents on one side and {len(b.ends)} on the other: run verify")
    for side in (a, b):
        _check_ends(side)
    shared_a, shared_b = np.zeros(a.num_tokens, np.bool_), np.zeros(b.num_tokens, np.bool_)
    counts = np.zeros(3, np.int64)
    proven = np.logical_and(a.exact, b.exact)
    different = _align(
        *(a.ids, a.byte_lengths, a.ends, _int64(closing_ids_a), shared_a),
        *(b.ids, b.byte_lengths, b.ends, _int64(closing_ids_b), shared_b),
        *(proven, counts),
    )
    if different != _ALIGNED:
        _refuse_different_bytes(a, b, different)
    num_spans, num_one_to_one, num_covered = counts.tolist()
    statistics = AlignmentStatistics(
        num_spans=num_spans,
        num_one_to_one=num_one_to_one,
        num_content_tokens=int(np.count_nonzero(b.byte_lengths)),
        num_covered=num_covered,
        num_unproven_documents=int(np.count_nonzero(~proven)),
    )
    return Alignment(shared_a, shared_b, statistics)


def _int64(ids: Collection[int]) -> np.ndarray:
    return np.array(sorted(ids), np.int64)


def _check_ends(side: TokenBlock) -> None:
    ends = side.ends
    last = int(ends[-1]) if len(ends) else 0
    if last != side.num_tokens or (len(ends) and (ends[0] < 0 or np.any(np.diff(ends) < 0))):
        raise StoreError(f"alignment: documents end at token {last} of {side.num_tokens}, or out of order: run verify")


def _refuse_different_bytes(a: TokenBlock, b: TokenBlock, document: int) -> None:
    totals = [int(side.byte_lengths[side.begins[document] : side.ends[document]].sum()) for side in (a, b)]
    raise StoreError(
        f"alignment: document {document} of the block has {totals[0]} bytes on one side and {totals[1]} on the other: "
        "the tokens are not of the same text, run verify"
    )


@numba.njit(nogil=True, cache=True)
def _align(  # type: ignore[no-untyped-def]
    ids_a, lengths_a, ends_a, closing_a, shared_a, ids_b, lengths_b, ends_b, closing_b, shared_b, proven, counts
):
    """Set the bits and ``counts`` (spans, those of one token each, tokens of b covered), document by document.

    Returns the first document whose bytes differ, or ``_ALIGNED``.
    """
    a = b = 0
    for document in range(len(ends_a)):
        end_a, end_b = ends_a[document], ends_b[document]
        if not proven[document]:
            if lengths_a[a:end_a].sum() != lengths_b[b:end_b].sum():
                return document
            a, b = end_a, end_b
            continue
        begin_b, num_without_bytes = b, 0
        follows_bytes = False
        while True:
            # Both sides are at the same byte, and if they follow bytes, then directly.
            if follows_bytes and a < end_a and b < end_b and lengths_a[a] == 0 and lengths_b[b] == 0:
                shared_a[a] = shared_b[b] = _is_among(ids_a[a], closing_a) and _is_among(ids_b[b], closing_b)
            while a < end_a and lengths_a[a] == 0:
                a += 1
            while b < end_b and lengths_b[b] == 0:
                b += 1
                num_without_bytes += 1
            if a == end_a or b == end_b:
                break
            shared_a[a] = shared_b[b] = True
            counts[0] += 1
            ahead = lengths_a[a] - lengths_b[b]
            if ahead == 0:
                counts[1] += 1
            a += 1
            b += 1
            while ahead != 0:  # bytes by which a is ahead of b
                if ahead < 0:
                    if a == end_a:
                        return document
                    ahead += lengths_a[a]
                    a += 1
                else:
                    if b == end_b:
                        return document
                    if lengths_b[b] == 0:
                        num_without_bytes += 1
                    ahead -= lengths_b[b]
                    b += 1
            follows_bytes = True
        if a < end_a or b < end_b:
            return document
        counts[2] += end_b - begin_b - num_without_bytes
    return _ALIGNED


@numba.njit(nogil=True, cache=True)
def _is_among(index, ids):  # type: ignore[no-untyped-def]
    for each in ids:  # noqa: SIM110 (Numba compiles no any() of a generator, and one of an array allocates it)
        if index == each:
            return True
    return False


@numba.njit(nogil=True, cache=True)
def _spans_of(lengths, ends, shared):  # type: ignore[no-untyped-def]
    """int64 [S, 2]: from each shared token with bytes to the last one before the next of them, or of the document."""
    spans = np.empty((np.count_nonzero(shared), 2), np.int64)
    num_spans = token = 0
    for end in ends:
        inside = False
        while token < end:
            if lengths[token] > 0:
                if shared[token]:
                    spans[num_spans, 0] = token
                    num_spans += 1
                    inside = True
                if inside:
                    spans[num_spans - 1, 1] = token + 1
            token += 1
    return spans[:num_spans].copy()
