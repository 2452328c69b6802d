"""Spans between shared beginnings, against a walk over bytes that anyone can read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitstore.alignment import align
from logitstore.consumer.spans import SpanLogprobs, realised_logprobs, spans_of_pairs, spans_of_tokens
from logitstore.sparse import NOT_STORED, SparseRows
from logitstore.token_parts import TokenBlock

DOCUMENTS = st.lists(st.tuples(st.integers(1, 12), st.randoms(use_true_random=False)), min_size=1, max_size=5)


EOS = 1


def block_of(documents: list[list[int]]) -> TokenBlock:
    """Tokens of these byte lengths; those without bytes are EOS."""
    lengths = np.array([length for document in documents for length in document], np.int32)
    ends = np.cumsum([len(document) for document in documents]).astype(np.int64)
    return TokenBlock(np.where(lengths, 7, EOS).astype(np.int32), lengths, ends, np.ones(len(documents), np.int8))


def cut(num_bytes: int, random) -> list[int]:
    """Byte lengths of tokens of one document: maybe a BOS, cuts anywhere, maybe an EOS."""
    cuts = sorted(random.sample(range(1, num_bytes), random.randint(0, num_bytes - 1)))
    lengths = np.diff([0, *cuts, num_bytes]).tolist()
    return [0] * random.randint(0, 1) + lengths + [0] * random.randint(0, 1)


def bytes_of(token: int, block: TokenBlock) -> set[tuple[int, int]]:
    """(document, byte) of what a token covers."""
    document = int(np.searchsorted(block.ends, token, side="right"))
    before = int(block.byte_lengths[block.begins[document] : token].sum())
    return {(document, before + n) for n in range(block.byte_lengths[token])}


@settings(deadline=None)
@given(DOCUMENTS)
def test_spans_are_the_same_bytes_on_either_side(documents: list) -> None:
    teacher, student = (block_of([cut(size, random) for size, random in documents]) for _ in range(2))
    pairs = align(teacher, student, [EOS], [EOS]).pairs()
    realised = -np.arange(1, teacher.num_tokens + 1, dtype=np.float32)
    spans = spans_of_pairs(pairs, teacher, student, realised)
    # Every token with bytes is in a span: a document's first byte is shared.
    assert ((spans.of_token >= 0) >= (student.byte_lengths > 0)).all()
    for number, (first, begin) in enumerate(zip(*pairs, strict=True)):
        mine = np.flatnonzero(spans.of_token == number)
        assert mine[0] == begin
        assert len(mine) == spans.num_tokens[number]
        covered = set().union(*(bytes_of(token, student) for token in mine))
        theirs = [token for token in range(teacher.num_tokens) if bytes_of(token, teacher) & covered] or [first]
        assert set().union(*(bytes_of(token, teacher) for token in theirs)) == covered
        assert spans.logprob[number] == pytest.approx(realised[theirs].sum())
        assert spans.continuation[number] == pytest.approx(realised[theirs[1:]].sum())


@settings(deadline=None)
@given(DOCUMENTS)
def test_open_tokens_begin_together_and_reach_to_the_students(documents: list) -> None:
    teacher, student = (block_of([cut(size, random) for size, random in documents]) for _ in range(2))
    pairs = align(teacher, student, [EOS], [EOS]).pairs()
    spans = spans_of_pairs(pairs, teacher, student, np.zeros(teacher.num_tokens, np.float32))
    of_student = dict(zip(pairs[0].tolist(), pairs[1].tolist(), strict=True))
    for token in range(student.num_tokens):
        begin, is_content = place_of(token, student), student.byte_lengths[token] > 0
        found = []
        for candidate, first in of_student.items():
            (document, at), size = place_of(candidate, teacher), int(teacher.byte_lengths[candidate])
            if size and first < token and document == begin[0] and at < begin[1] <= at + size:
                found.append((candidate, token - first))
        known = (int(spans.open_token[token]), int(spans.num_written[token]))
        # Tokens without bytes have one only where they are closers that both sides have.
        assert [known] == found if is_content and found else known == (-1, 0) or found == [known]


def place_of(token: int, block: TokenBlock) -> tuple[int, int]:
    """(document, byte) where a token begins."""
    document = int(np.searchsorted(block.ends, token, side="right"))
    return document, int(block.byte_lengths[block.begins[document] : token].sum())


def test_a_span_with_a_token_that_was_not_scored_has_no_logprob() -> None:
    teacher, student = block_of([[0, 1, 2, 3]]), block_of([[0, 1, 5]])
    realised = np.array([np.nan, -1, -2, np.nan], np.float32)
    spans = spans_of_pairs((np.array([1, 2]), np.array([1, 2])), teacher, student, realised)
    assert spans.of_token.tolist() == [-1, 0, 1]
    assert spans.logprob[0] == -1
    assert np.isnan(spans.logprob[1])


def test_documents_without_shared_beginnings_have_no_spans() -> None:
    teacher, student = block_of([[2], [2]]), block_of([[1, 1], [1, 1]])
    spans = spans_of_pairs((np.array([0]), np.array([0])), teacher, student, np.zeros(2, np.float32))
    assert spans.of_token.tolist() == [0, 0, -1, -1]
    none = spans_of_pairs((np.zeros(0, np.int64),) * 2, teacher, student, np.zeros(2, np.float32))
    assert none.of_token.tolist() == [-1] * 4


def test_own_tokens_are_spans_of_one() -> None:
    spans: SpanLogprobs = spans_of_tokens(np.array([-1, np.nan], np.float32))
    assert spans.of_token.tolist() == [0, 1]
    assert spans.continuation.tolist() == [0, 0]


def test_realised_logprobs_are_first_entries() -> None:
    offsets = np.array([0, 2, 2, 3])
    quanta = np.array([15, NOT_STORED, 7], np.uint16)
    rows = SparseRows(offsets, np.array([5, 6, 7], np.int32), quanta, np.array([0, 1, 0], np.uint16), 0.1)
    np.testing.assert_allclose(realised_logprobs(rows), [-1.5, np.nan, -0.7], rtol=1e-6)
