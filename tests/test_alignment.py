"""Alignment against a reference in plain sets, and what its statistics say."""

from __future__ import annotations

import numpy as np
import pytest
from builders import TEXTS, build_bytelevel_tokenizer, build_metaspace_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from logitstore.alignment import Alignment, AlignmentStatistics, align
from logitstore.documents import Document, Segment
from logitstore.errors import StoreError
from logitstore.tokenizer import Tokenizer


def to_arrays(documents, exact=None):
    lengths = np.array([length for document in documents for length in document], dtype=np.int32)
    ends = np.cumsum([len(document) for document in documents]).astype(np.int64)
    return lengths, ends, np.ones(len(documents), bool) if exact is None else np.array(exact)


def align_lists(documents_a, documents_b, exact_a=None, exact_b=None) -> Alignment:
    return align(*to_arrays(documents_a, exact_a), *to_arrays(documents_b, exact_b))


def naive_keys(documents):
    """Key -> token index over the block, per document, as the module's docstring defines it."""
    keys, token = {}, 0
    for number, lengths in enumerate(documents):
        byte = 0
        for position, length in enumerate(lengths):
            if length > 0:
                keys[number, 2 * byte + 1] = token
            elif position > 0 and lengths[position - 1] > 0:
                keys[number, 2 * byte] = token
            byte += length
            token += 1
    return keys


@st.composite
def tokenised_pairs(draw):
    """The same documents cut twice, tokens without bytes strewn in anywhere."""

    def cut(size):
        cuts = sorted(draw(st.sets(st.integers(1, size - 1)))) if size > 1 else []
        lengths = np.diff([0, *cuts, size]).tolist() if size else []
        for place in draw(st.lists(st.integers(0, len(lengths)), max_size=4)):
            lengths.insert(place, 0)
        return lengths

    sizes = draw(st.lists(st.integers(0, 12), max_size=5))
    return [cut(size) for size in sizes], [cut(size) for size in sizes]


@settings(deadline=None)  # the first call compiles
@given(tokenised_pairs())
def test_align_equals_the_intersection_of_key_sets(pair):
    documents_a, documents_b = pair
    alignment = align_lists(documents_a, documents_b)
    keys_a, keys_b = naive_keys(documents_a), naive_keys(documents_b)
    common = sorted(keys_a.keys() & keys_b.keys())
    rows_a, rows_b = alignment.pairs()
    assert rows_a.dtype == rows_b.dtype == np.int64
    assert rows_a.tolist() == [keys_a[key] for key in common]
    assert rows_b.tolist() == [keys_b[key] for key in common]


@settings(deadline=None)  # the first call compiles
@given(tokenised_pairs())
def test_align_is_symmetric_in_its_pairs(pair):
    there, back = align_lists(*pair), align_lists(*pair[::-1])
    assert np.array_equal(there.shared_a, back.shared_b)
    assert np.array_equal(there.shared_b, back.shared_a)


@settings(deadline=None)  # the first call compiles
@given(tokenised_pairs())
def test_align_covers_every_token_of_exact_documents(pair):
    statistics = align_lists(*pair).statistics
    assert statistics.coverage == 1.0
    assert statistics.num_one_to_one <= statistics.num_spans <= statistics.num_content_tokens


def test_align_pairs_closers_but_no_other_tokens_without_bytes():
    # BOS, two turns with headers, EOS against no BOS, other headers and no EOS.
    alignment = align_lists([[0, 0, 3, 0, 0, 2, 0]], [[0, 1, 2, 0, 1, 1]])
    assert [rows.tolist() for rows in alignment.pairs()] == [[2, 3, 5], [1, 3, 4]]


def test_align_does_not_take_the_next_documents_bos_for_a_closer():
    alignment = align_lists([[2], [0, 2]], [[2, 0], [2]])
    assert [rows.tolist() for rows in alignment.pairs()] == [[0, 2], [0, 2]]


def test_align_counts_one_to_one_spans():
    statistics = align_lists([[2, 2, 1, 0]], [[2, 1, 1, 1, 0]]).statistics
    assert statistics == AlignmentStatistics(num_spans=3, num_one_to_one=2, num_content_tokens=4, num_covered=4)


def test_align_does_not_count_documents_that_are_inexact_on_either_side():
    documents = [[1, 1], [1, 1], [2]]
    alignment = align_lists(documents, documents, exact_a=[True, False, True], exact_b=[True, True, False])
    assert alignment.shared_b.all()
    assert alignment.statistics.coverage == 2 / 5


def test_align_takes_a_block_without_tokens():
    alignment = align_lists([[]], [[]])
    assert alignment.statistics.coverage == 1.0
    assert len(alignment.shared_a) == len(alignment.shared_b) == 0


def test_statistics_add_up():
    one, two = AlignmentStatistics(1, 1, 4, 1), AlignmentStatistics(2, 0, 4, 3)
    assert one + two == AlignmentStatistics(3, 1, 8, 4)
    assert (one + two).coverage == 0.5


def test_align_real_tokenizers_at_equal_bytes(tmp_path):
    kinds = {"a": build_bytelevel_tokenizer, "b": build_metaspace_tokenizer}
    tokenizers = [Tokenizer.from_folder(build(tmp_path / name)) for name, build in kinds.items()]
    documents = [Document((Segment("text", text),)) for text in TEXTS]
    documents.append(Document((Segment("user", " What? 🎉"), Segment("assistant", "That,\r\nover the lazy dog."))))
    sides = []
    for tokenizer in tokenizers:
        tokenised = tokenizer.tokenize(documents)
        lengths = np.concatenate([tokens.byte_lengths for tokens in tokenised])
        sides.append((lengths, np.cumsum([len(tokens.ids) for tokens in tokenised]), np.ones(len(documents), bool)))
    alignment = align(*sides[0], *sides[1])
    starts = [
        (np.cumsum(lengths) - lengths)[rows] for (lengths, _, _), rows in zip(sides, alignment.pairs(), strict=True)
    ]
    assert np.array_equal(*starts)
    assert alignment.statistics.coverage == 1.0
    assert (~(sides[1][0] > 0) & alignment.shared_b).sum() == len(TEXTS) + 2  # each EOS and each end of turn


@pytest.mark.parametrize(
    ("documents_a", "documents_b", "message"),
    [
        ([[1], [2, 1]], [[1], [2]], "document 1 of the block has 3 bytes on one side and 2 on the other"),
        ([[1]], [[1], []], "1 documents on one side and 2 on the other"),
    ],
)
def test_align_refuses_tokens_of_different_documents(documents_a, documents_b, message):
    with pytest.raises(StoreError, match=message):
        align_lists(documents_a, documents_b)


def test_align_refuses_ends_that_do_not_fit_the_tokens():
    lengths, ends, exact = to_arrays([[1, 1], [1]])
    with pytest.raises(StoreError, match="documents end at token 3 of 2"):
        align(lengths[:2], ends, exact, lengths, ends, exact)
