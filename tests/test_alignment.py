"""Alignment against a reference in plain sets, its spans, and what its statistics say."""

from __future__ import annotations

import numpy as np
import pytest
from builders import SPECIAL_TOKENS, TEXTS, build_bytelevel_tokenizer, build_metaspace_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from logitstore.alignment import Alignment, AlignmentStatistics, Spans, align
from logitstore.documents import Document, Segment
from logitstore.errors import StoreError
from logitstore.token_parts import TokenBlock
from logitstore.tokenizer import Tokenizer

CLOSING, OTHER = 1, 2
"""Ids of tokens without bytes; the two sides call what closes differently: b's is ``CLOSING_B``."""
CLOSING_B = 7


def block_of(documents, exact=None, closing=CLOSING) -> TokenBlock:
    """Documents as lists of lengths. Tokens without bytes close, unless they are written as -1."""
    flat = [length for document in documents for length in document]
    ids = [{0: closing, -1: OTHER}.get(length, 0) for length in flat]
    return TokenBlock(
        np.array(ids, np.int32),
        np.array([max(length, 0) for length in flat], np.int32),
        np.cumsum([len(document) for document in documents]).astype(np.int64),
        np.ones(len(documents), bool) if exact is None else np.array(exact, bool),
    )


def blocks_of(documents_a, documents_b, exact_a=None, exact_b=None) -> tuple[TokenBlock, TokenBlock]:
    return block_of(documents_a, exact_a), block_of(documents_b, exact_b, CLOSING_B)


def align_lists(documents_a, documents_b, exact_a=None, exact_b=None) -> Alignment:
    return align(*blocks_of(documents_a, documents_b, exact_a, exact_b), [CLOSING], [CLOSING_B])


def pairs_of(*documents) -> list[list[int]]:
    return [rows.tolist() for rows in align_lists(*documents).pairs()]


def naive_places(documents, exact):
    """Place -> token index over the block: where a token with bytes begins, and where a closer stands."""
    places, token = {}, 0
    for number, lengths in enumerate(documents):
        byte = 0
        for position, length in enumerate(lengths):
            if length > 0:
                places[number, byte, "begins"] = token
            elif length == 0 and position > 0 and lengths[position - 1] > 0:
                places[number, byte, "closes"] = token
            byte += max(length, 0)
            token += 1
    return {place: token for place, token in places.items() if exact[place[0]]}


@st.composite
def tokenised_pairs(draw):
    """The same documents cut twice, tokens without bytes strewn in anywhere; and which are proven."""

    def cut(size):
        cuts = sorted(draw(st.sets(st.integers(1, size - 1)))) if size > 1 else []
        lengths = np.diff([0, *cuts, size]).tolist() if size else []
        for place in draw(st.lists(st.integers(0, len(lengths)), max_size=4)):
            lengths.insert(place, draw(st.sampled_from([0, -1])))
        return lengths

    sizes = draw(st.lists(st.integers(0, 12), max_size=8))
    exact = draw(st.lists(st.sampled_from([True, True, False]), min_size=len(sizes), max_size=len(sizes)))
    return [cut(size) for size in sizes], [cut(size) for size in sizes], exact


@settings(deadline=None)  # the first call compiles
@given(tokenised_pairs())
def test_align_equals_the_intersection_of_sets(found):
    documents_a, documents_b, exact = found
    alignment = align_lists(documents_a, documents_b, exact)
    places_a, places_b = naive_places(documents_a, exact), naive_places(documents_b, exact)
    common = places_a.keys() & places_b.keys()
    rows_a, rows_b = alignment.pairs()
    assert rows_a.dtype == rows_b.dtype == np.int64
    assert rows_a.tolist() == sorted(places_a[place] for place in common)
    assert rows_b.tolist() == sorted(places_b[place] for place in common)
    assert dict(zip(rows_a.tolist(), rows_b.tolist(), strict=True)) == {places_a[p]: places_b[p] for p in common}


def test_align_of_many_documents_equals_the_intersection_of_sets():
    generator = np.random.default_rng(0)

    def cut(size):
        cuts = np.flatnonzero(generator.random(size - 1) < 0.3) + 1 if size > 1 else []
        return [-1, *np.diff([0, *cuts, size]).tolist(), 0] if size else [0]

    sizes = generator.integers(0, 40, 3000).tolist()
    documents_a, documents_b = [cut(size) for size in sizes], [cut(size) for size in sizes]
    exact = (generator.random(len(sizes)) < 0.9).tolist()
    alignment = align_lists(documents_a, documents_b, None, exact)
    places_a, places_b = naive_places(documents_a, exact), naive_places(documents_b, exact)
    common = places_a.keys() & places_b.keys()
    assert alignment.pairs()[0].tolist() == sorted(places_a[place] for place in common)
    assert alignment.pairs()[1].tolist() == sorted(places_b[place] for place in common)
    assert alignment.statistics.num_unproven_documents == exact.count(False)


@settings(deadline=None)  # the first call compiles
@given(tokenised_pairs())
def test_align_is_symmetric_in_its_pairs(found):
    documents_a, documents_b, exact = found
    there = align_lists(documents_a, documents_b, exact)
    back = align(*blocks_of(documents_a, documents_b, exact)[::-1], [CLOSING_B], [CLOSING])
    assert np.array_equal(there.shared_a, back.shared_b)
    assert np.array_equal(there.shared_b, back.shared_a)


@settings(deadline=None)  # the first call compiles
@given(tokenised_pairs())
def test_spans_cover_every_token_of_proven_documents_once_and_the_same_bytes(found):
    documents_a, documents_b, exact = found
    a, b = blocks_of(documents_a, documents_b, exact)
    alignment = align(a, b, [CLOSING], [CLOSING_B])
    spans = Spans.between(a, alignment.shared_a, b, alignment.shared_b)
    assert spans.a.dtype == spans.b.dtype == np.int64
    assert len(spans) == alignment.statistics.num_spans
    assert len(spans.one_to_one()[0]) == alignment.statistics.num_one_to_one
    for side, ranges in ((a, spans.a), (b, spans.b)):
        inside = [n for begin, end in ranges.tolist() for n in range(begin, end)]
        assert inside == sorted(set(inside))
        wanted = np.repeat(exact, np.diff(side.ends, prepend=0)).astype(bool) & (side.byte_lengths > 0)
        assert set(np.flatnonzero(wanted)) == {n for n in inside if side.byte_lengths[n] > 0}
    sizes = [
        [int(side.byte_lengths[begin:end].sum()) for begin, end in ranges.tolist()]
        for side, ranges in ((a, spans.a), (b, spans.b))
    ]
    assert sizes[0] == sizes[1]
    assert spans.longest == max((end - begin for begin, end in [*spans.a.tolist(), *spans.b.tolist()]), default=0)
    # None can be cut shorter: inside, no two tokens end at the same byte.
    for (begin_a, end_a), (begin_b, end_b) in zip(spans.a.tolist(), spans.b.tolist(), strict=True):
        ends = [
            set(np.cumsum(side.byte_lengths[begin:end]).tolist())
            for side, begin, end in ((a, begin_a, end_a), (b, begin_b, end_b))
        ]
        assert ends[0] & ends[1] == {a.byte_lengths[begin_a:end_a].sum()}


@settings(deadline=None)  # the first call compiles
@given(tokenised_pairs())
def test_align_covers_every_token_of_proven_documents(found):
    documents_a, documents_b, exact = found
    statistics = align_lists(documents_a, documents_b, exact).statistics
    lengths = [length for document, proven in zip(documents_b, exact, strict=True) for length in document if proven]
    assert statistics.num_covered == sum(length > 0 for length in lengths)
    assert statistics.num_unproven_documents == exact.count(False)
    assert statistics.num_covered + statistics.num_unproven_tokens == statistics.num_content_tokens
    assert statistics.num_one_to_one <= statistics.num_spans <= statistics.num_content_tokens


def test_spans_are_what_one_would_draw_on_a_board():
    # <s> ab c de </s>, against  a bcd e </s>: one span of 3 tokens and 3, since c and de are cut inside bcd.
    a, b = blocks_of([[-1, 2, 1, 2, 0], [1, 1]], [[1, 3, 1, 0], [1, 1]])
    alignment = align(a, b, [CLOSING], [CLOSING_B])
    spans = Spans.between(a, alignment.shared_a, b, alignment.shared_b)
    assert spans.a.tolist() == [[1, 4], [5, 6], [6, 7]]
    assert spans.b.tolist() == [[0, 3], [4, 5], [5, 6]]
    assert [rows.tolist() for rows in spans.one_to_one()] == [[5, 6], [4, 5]]
    assert spans.longest == 3
    assert [rows.tolist() for rows in alignment.pairs()] == [[1, 4, 5, 6], [0, 3, 4, 5]]


def test_align_pairs_closers_but_no_other_tokens_without_bytes():
    # BOS, two turns with headers, EOS against no BOS, other headers and no EOS.
    assert pairs_of([[-1, -1, 3, 0, -1, 2, 0]], [[-1, 1, 2, 0, 1, 1]]) == [[2, 3, 5], [1, 3, 4]]


def test_align_does_not_pair_a_closer_with_a_templates_own_text():
    # After "abc", one template ends the turn, the other writes a newline first.
    assert pairs_of([[3, 0]], [[3, -1, 0]]) == [[0], [0]]
    assert pairs_of([[3, -1]], [[3, -1]]) == [[0], [0]]


def test_align_does_not_take_the_next_documents_bos_for_a_closer():
    assert pairs_of([[2], [0, 2]], [[2, 0], [2]]) == [[0, 2], [0, 2]]


def test_align_counts_one_to_one_spans():
    statistics = align_lists([[2, 2, 1, 0]], [[2, 1, 1, 1, 0]]).statistics
    assert statistics == AlignmentStatistics(num_spans=3, num_one_to_one=2, num_content_tokens=4, num_covered=4)


def test_align_shares_nothing_of_documents_that_are_unproven_on_either_side():
    documents = [[1, 1, 0], [1, 1, 0], [2, 0]]
    alignment = align_lists(documents, documents, exact_a=[True, False, True], exact_b=[True, True, False])
    assert alignment.shared_a.tolist() == alignment.shared_b.tolist() == [True] * 3 + [False] * 5
    statistics = alignment.statistics
    assert (statistics.num_spans, statistics.num_covered) == (2, 2)
    assert (statistics.num_unproven_documents, statistics.num_unproven_tokens) == (2, 3)
    assert statistics.coverage == 2 / 5


@pytest.mark.parametrize("documents", [[], [[]], [[], [0], []]])
def test_align_takes_blocks_without_content(documents):
    a, b = blocks_of(documents, documents)
    alignment = align(a, b, [CLOSING], [CLOSING_B])
    assert alignment.statistics.coverage == 1.0
    assert not alignment.shared_a.any()
    assert not alignment.shared_b.any()
    spans = Spans.between(a, alignment.shared_a, b, alignment.shared_b)
    assert (len(spans), spans.longest, spans.a.shape) == (0, 0, (0, 2))


def test_statistics_add_up():
    one, two = AlignmentStatistics(1, 1, 4, 1, 1), AlignmentStatistics(2, 0, 4, 3, 2)
    assert one + two == AlignmentStatistics(3, 1, 8, 4, 3)
    assert (one + two).coverage == 0.5
    assert (one + two).num_unproven_tokens == 4


def test_align_real_tokenizers_at_equal_bytes(tmp_path):
    kinds = {"a": build_bytelevel_tokenizer, "b": build_metaspace_tokenizer}
    tokenizers = [Tokenizer.from_folder(build(tmp_path / name)) for name, build in kinds.items()]
    documents = [Document((Segment("text", text),)) for text in TEXTS]
    documents.append(Document((Segment("user", " What? 🎉"), Segment("assistant", "That,\r\nover the lazy dog."))))
    sides = []
    for tokenizer in tokenizers:
        tokenised = tokenizer.tokenize(documents)
        sides.append(
            TokenBlock(
                np.concatenate([tokens.ids for tokens in tokenised]),
                np.concatenate([tokens.byte_lengths for tokens in tokenised]),
                np.cumsum([len(tokens.ids) for tokens in tokenised]),
                np.array([tokens.exact for tokens in tokenised]),
            )
        )
    closing = [SPECIAL_TOKENS.index(name) for name in ("</s>", "<|im_end|>")]
    alignment = align(*sides, closing, closing)
    starts = [
        (np.cumsum(side.byte_lengths) - side.byte_lengths)[rows]
        for side, rows in zip(sides, alignment.pairs(), strict=True)
    ]
    assert np.array_equal(*starts)
    assert alignment.statistics.coverage == 1.0
    assert ((sides[1].byte_lengths == 0) & alignment.shared_b).sum() == len(TEXTS) + 2  # each EOS and each end of turn


@pytest.mark.parametrize(
    ("documents_a", "documents_b", "message"),
    [
        ([[1], [2, 1]], [[1], [2]], "document 1 of the block has 3 bytes on one side and 2 on the other"),
        ([[1], [2]], [[1], [2, 1]], "document 1 of the block has 2 bytes on one side and 3 on the other"),
        ([[3, 1], [2]], [[1, 1], [2]], "document 0 of the block has 4 bytes on one side and 2 on the other"),
        ([[1, 1], [2]], [[3, 1], [2]], "document 0 of the block has 2 bytes on one side and 4 on the other"),
        ([[2], []], [[2], [1]], "document 1 of the block has 0 bytes on one side and 1 on the other"),
        ([[1]], [[1], []], "1 documents on one side and 2 on the other"),
    ],
)
@pytest.mark.parametrize("proven", [True, False])
def test_align_refuses_tokens_of_different_documents(documents_a, documents_b, message, proven):
    with pytest.raises(StoreError, match=message):
        align_lists(documents_a, documents_b, [proven] * len(documents_a))


@pytest.mark.parametrize("ends", [[2, 4], [3, 2, 3], [-1, 3], [2], []])
def test_align_refuses_ends_that_do_not_fit_the_tokens(ends):
    whole = block_of([[1, 1], [1]])
    wrong = TokenBlock(whole.ids, whole.byte_lengths, np.array(ends, np.int64), np.ones(len(ends), bool))
    with pytest.raises(StoreError, match="documents end at token"):
        align(wrong, wrong)


def test_align_takes_arrays_of_any_strides():
    tokens = np.stack([np.arange(6), np.ones(6)], axis=1).astype(np.int32)
    strided = TokenBlock(tokens[:, 0], tokens[:, 1], np.array([6]), np.ones(1, bool))
    assert align(strided, strided).shared_a.all()
