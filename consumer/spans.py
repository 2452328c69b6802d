"""Spans: the text between one shared beginning of two tokenisations and the next, and what a teacher said of each.

A span that begins with a token with bytes has all tokens with bytes up to the next shared beginning, or to the end of
the document, on either side: the same bytes. One that begins with a closer (see ``logitstore.alignment``) is that token
alone. So by the chain rule a span's log-prob is the sum of its tokens', however many there are on either side.

Shapes: P spans, T tokens of the student, Ta of the teacher, D documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from logitstore.sparse import SparseRows, dequantise
from logitstore.token_parts import TokenBlock


@dataclass(frozen=True)
class SpanLogprobs:
    """What a teacher said of the spans of a block.

    Attributes:
        of_token: int64 [T], the span of each student token; -1: it is in none.
        num_tokens: int64 [P], student tokens of each span.
        logprob: float32 [P], nats, the teacher's log-prob of the whole span; NaN if part of it was not scored.
        continuation: float32 [P], the same without the teacher's first token: 0 where it has one token alone.
        open_token: int64 [T], the teacher's token that might go on where a student token begins: that which it is
            inside of, or that which ends there. It begins at a shared place itself; -1: there is none such.
        num_written: int64 [T], student tokens from the beginning of that to this one.
    """

    of_token: np.ndarray
    num_tokens: np.ndarray
    logprob: np.ndarray
    continuation: np.ndarray
    open_token: np.ndarray
    num_written: np.ndarray


def realised_logprobs(rows: SparseRows) -> np.ndarray:
    """float32 [T], nats: what a teacher gave to each token of the text, its row's first entry; NaN if not scored."""
    logprobs = np.full(rows.num_rows, np.nan, np.float32)
    logprobs[rows.scored] = dequantise(rows.quanta[rows.offsets[:-1][rows.scored]], rows.step_nats)
    return logprobs


def spans_of_tokens(realised: np.ndarray) -> SpanLogprobs:
    """Each token of a teacher with the student's own tokens is a span.

    Args:
        realised: float32 [T], nats, NaN if not scored.
    """
    size = len(realised)
    none, zero = np.full(size, -1, np.int64), np.zeros(size, np.int64)
    return SpanLogprobs(np.arange(size), zero + 1, realised, np.zeros(size, np.float32), none, zero)


def spans_of_pairs(
    pairs: tuple[np.ndarray, np.ndarray], teacher: TokenBlock, student: TokenBlock, realised: np.ndarray
) -> SpanLogprobs:
    """SpanLogprobs between two tokenisations of a block.

    Args:
        pairs: int64 [P] indices of the teacher's tokens, and of the student's, that begin at the same places.
        teacher: its tokens.
        student: its tokens.
        realised: float32 [Ta], nats, of the teacher's tokens.
    """
    firsts, num_spans = pairs[0], len(pairs[0])
    of_teacher, of_student = (_spans_of(begins, side) for begins, side in zip(pairs, (teacher, student), strict=True))
    within = of_teacher >= 0
    logprob = np.bincount(of_teacher[within], weights=realised[within], minlength=num_spans)
    within[firsts] = False
    continuation = np.bincount(of_teacher[within], weights=realised[within], minlength=num_spans)
    num_tokens = np.bincount(of_student[of_student >= 0], minlength=num_spans)
    open_tokens = _open_tokens(pairs, of_student, teacher, student)
    logprobs = (logprob.astype(np.float32), continuation.astype(np.float32))
    return SpanLogprobs(of_student, num_tokens, *logprobs, *open_tokens)


def _spans_of(begins: np.ndarray, tokens: TokenBlock) -> np.ndarray:
    """int64 [T]: the span of each token, given where they begin [P]; -1: none."""
    if len(begins) == 0:
        return np.full(tokens.num_tokens, -1, np.int64)
    is_first = np.zeros(tokens.num_tokens, bool)
    is_first[begins] = True
    span = np.cumsum(is_first) - 1
    document = np.repeat(np.arange(len(tokens.ends)), np.diff(tokens.ends, prepend=0))
    first = begins[np.maximum(span, 0)]
    has_bytes = tokens.byte_lengths > 0
    goes_on = (span >= 0) & (document == document[first]) & has_bytes & has_bytes[first]
    return np.where(is_first | goes_on, span, -1)


def _open_tokens(
    pairs: tuple[np.ndarray, np.ndarray], span: np.ndarray, teacher: TokenBlock, student: TokenBlock
) -> tuple[np.ndarray, np.ndarray]:
    """``SpanLogprobs.open_token`` and ``num_written``; ``span``: int64 [T], of each student token."""
    firsts, begins = pairs
    open_token, num_written = np.full(len(span), -1, np.int64), np.zeros(len(span), np.int64)
    byte = np.cumsum(student.byte_lengths, dtype=np.int64) - student.byte_lengths
    num_with_bytes = np.concatenate([[0], np.cumsum(student.byte_lengths > 0)])

    def mark(tokens: np.ndarray, spans: np.ndarray) -> None:
        """These begin inside the first teacher token of these spans, or at its end."""
        reach = byte[tokens] - byte[begins[spans]]
        count = tokens - begins[spans]
        # Tokens of a template may stand between two contents, and with them the count says nothing.
        is_run = num_with_bytes[tokens] - num_with_bytes[begins[spans]] == count
        kept = is_run & (count > 0) & (reach > 0) & (reach <= teacher.byte_lengths[firsts[spans]])
        open_token[tokens[kept]], num_written[tokens[kept]] = firsts[spans[kept]], count[kept]

    inside = np.flatnonzero(span >= 0)
    mark(inside, span[inside])
    document = np.searchsorted(student.ends, begins, side="right")
    follows = np.flatnonzero((document[1:] == document[:-1]) & (firsts[1:] == firsts[:-1] + 1))
    mark(begins[follows + 1], follows)
    return open_token, num_written
