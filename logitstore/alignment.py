"""Alignment of two tokenisations of the same documents: which tokens begin at the same place.

Both sides cut the same bytes, so their boundaries are two sorted lists, and the alignment is the intersection: linear
and exact. It is kept as a bit per token and side; the k-th set bit of one side pairs with the k-th of the other.

Tokens with bytes begin at a byte. Of those without (BOS, EOS, what a chat template writes), only the *closer* has a
place that both sides know: the first one directly after a token with bytes, an end of turn or EOS. So each has a key:

    2 b       the closer at byte b
    2 b + 1   the token with bytes that begins at byte b

With b counted from the start of the block, keys increase strictly from token to token and from document to document,
and the first token with bytes of a document is always shared.

Shapes: Ta, Tb tokens of the sides a and b (the student's), D documents, K tokens with a key, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numba
import numpy as np

from logitstore.errors import StoreError


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
    """Those of them that lie in a span of a document whose byte lengths are exact on both sides."""

    @property
    def coverage(self) -> float:
        """Share of b's tokens with bytes that are covered, in 0..1; 1 if there are none."""
        return self.num_covered / self.num_content_tokens if self.num_content_tokens else 1.0

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
        """Indices int64 [P] of the tokens of a, and of those of b that begin at the same places."""
        return np.flatnonzero(self.shared_a), np.flatnonzero(self.shared_b)


def align(
    lengths_a: np.ndarray,
    ends_a: np.ndarray,
    exact_a: np.ndarray,
    lengths_b: np.ndarray,
    ends_b: np.ndarray,
    exact_b: np.ndarray,
) -> Alignment:
    """Align two tokenisations of the same documents.

    Args:
        lengths_a: [Ta] canonical bytes that each token newly covers, documents one after the other.
        ends_a: [D] where each document's tokens end.
        exact_a: bool [D], whether the document's lengths are proven. Others are aligned too, but cover nothing.
        lengths_b: [Tb], the student's side.
        ends_b: [D].
        exact_b: bool [D].

    Raises:
        StoreError: the sides are not of the same documents: their numbers, or the bytes of one, differ.
    """
    lengths_a, lengths_b = (np.ascontiguousarray(lengths, dtype=np.int64) for lengths in (lengths_a, lengths_b))
    ends_a, ends_b = (np.ascontiguousarray(ends, dtype=np.int64) for ends in (ends_a, ends_b))
    _check_same_documents(lengths_a, ends_a, lengths_b, ends_b)
    keyed_a, keys_a = _keys(lengths_a, ends_a)
    keyed_b, keys_b = _keys(lengths_b, ends_b)
    shared_a, shared_b = np.zeros(len(lengths_a), dtype=np.bool_), np.zeros(len(lengths_b), dtype=np.bool_)
    _intersect(keyed_a, keys_a, keyed_b, keys_b, shared_a, shared_b)
    exact_b_T = np.repeat(np.logical_and(exact_a, exact_b), np.diff(ends_b, prepend=0))
    statistics = _count(lengths_a[shared_a], lengths_b[shared_b], lengths_b, exact_b_T)
    return Alignment(shared_a, shared_b, statistics)


def _check_same_documents(lengths_a: np.ndarray, ends_a: np.ndarray, lengths_b: np.ndarray, ends_b: np.ndarray) -> None:
    if len(ends_a) != len(ends_b):
        raise StoreError(f"alignment: {len(ends_a)} documents on one side and {len(ends_b)} on the other: run verify")
    totals_a, totals_b = _total_bytes(lengths_a, ends_a), _total_bytes(lengths_b, ends_b)
    different = np.flatnonzero(totals_a != totals_b)
    if len(different):
        n = int(different[0])
        raise StoreError(
            f"alignment: document {n} of the block has {totals_a[n]} bytes on one side and {totals_b[n]} on the other: "
            "the tokens are not of the same text, run verify"
        )


def _total_bytes(lengths: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Bytes of each document, int64 [D]."""
    if len(ends) and (ends[-1] != len(lengths) or ends[0] < 0 or np.any(np.diff(ends) < 0)):
        raise StoreError(f"alignment: documents end at token {ends[-1]} of {len(lengths)}, or out of order: run verify")
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return np.diff(before[ends], prepend=0)


def _keys(lengths: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that have a key, int64 [K], and their keys, int64 [K]."""
    has_bytes = lengths > 0
    closes = ~has_bytes
    closes[1:] &= has_bytes[:-1]
    begins = np.concatenate([np.zeros(1, np.int64), ends])  # of documents: nothing there closes the document before
    closes[begins[begins < len(lengths)]] = False
    tokens = np.flatnonzero(has_bytes | closes)
    byte = np.cumsum(lengths) - lengths
    return tokens, 2 * byte[tokens] + has_bytes[tokens]


@numba.njit(nogil=True, cache=True)
def _intersect(keyed_a, keys_a, keyed_b, keys_b, shared_a, shared_b):  # type: ignore[no-untyped-def]
    """Set the bits of tokens with equal keys, in one walk over both sides."""
    a = b = 0
    while a < len(keys_a) and b < len(keys_b):
        if keys_a[a] == keys_b[b]:
            shared_a[keyed_a[a]] = shared_b[keyed_b[b]] = True
            a += 1
            b += 1
        elif keys_a[a] < keys_b[b]:
            a += 1
        else:
            b += 1


def _count(
    shared_lengths_a: np.ndarray, shared_lengths_b: np.ndarray, lengths_b: np.ndarray, exact_b: np.ndarray
) -> AlignmentStatistics:
    """Statistics from the lengths of paired tokens [P], and lengths and exactness of all tokens of b [Tb]."""
    begins_span = shared_lengths_b > 0
    # Tokens of equal length that begin together end together: nothing of either side lies between.
    one_to_one = begins_span & (shared_lengths_a == shared_lengths_b)
    has_bytes = lengths_b > 0
    return AlignmentStatistics(
        num_spans=int(begins_span.sum()),
        num_one_to_one=int(one_to_one.sum()),
        num_content_tokens=int(has_bytes.sum()),
        # A document's first and last byte are boundaries of both sides, so its spans leave no token out.
        num_covered=int((has_bytes & exact_b).sum()),
    )
