"""The common partition of two vocabularies."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitstore.token_cuts import cut_tokens
from logitstore.vocabulary_classes import VocabularyClasses, vocabulary_classes

BYTES = [bytes([byte]) for byte in b"ab1 "]


def classes_of(student: list[bytes | None], teacher: list[bytes | None], **options: object) -> VocabularyClasses:
    return vocabulary_classes(cut_tokens(student, teacher).first, cut_tokens(teacher, student).first, **options)  # type: ignore[arg-type]


def test_digits_of_different_grain_share_a_class() -> None:
    student: list[bytes | None] = [b"1", b"12", b"123", b"2", b"a"]
    teacher: list[bytes | None] = [b"1", b"2", b"a", b"ab"]
    classes = classes_of(student, teacher)
    by_token = dict(zip(student, classes.student_class, strict=True))
    assert by_token[b"1"] == by_token[b"12"] == by_token[b"123"] == classes.teacher_class[0]
    assert by_token[b"2"] == classes.teacher_class[1]
    assert by_token[b"a"] == classes.teacher_class[2] == classes.teacher_class[3]
    # The other way round: a student of single digits puts 12 and 123 where it puts 1.
    reverse = classes_of(teacher, student)
    assert reverse.teacher_class[0] == reverse.teacher_class[1] == reverse.teacher_class[2] == reverse.student_class[0]


def test_special_tokens_meet_by_role_only() -> None:
    student, teacher = [b"a", None, None], [None, b"a", None]
    classes = classes_of(student, teacher, role_pairs=[(1, 2)])
    assert classes.student_class[1] == classes.teacher_class[2]
    assert classes.teacher_class[0] == -1
    assert classes.student_class[2] not in classes.teacher_class
    assert classes.num_classes == 3


def test_identical_vocabularies_have_one_class_a_token() -> None:
    tokens: list[bytes | None] = [b"a", b"b", b"ab", b"1", None]
    classes = classes_of(tokens, tokens, role_pairs=[(4, 4)])
    assert classes.num_classes == len(tokens)
    assert classes.student_class.tolist() == classes.teacher_class.tolist()


def test_first_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match=r"first teacher tokens span 0\.\.2, expected ids in -1\.\.1"):
        vocabulary_classes(np.array([0, 2]), np.array([0, 1]))
    with pytest.raises(ValueError, match="pair student token 9"):
        vocabulary_classes(np.array([0, 1]), np.array([0, 1]), [(9, 0)])


vocabularies = st.lists(st.text("ab1 ", min_size=2, max_size=4).map(str.encode), max_size=12, unique=True)


@given(vocabularies, vocabularies)
@settings(max_examples=200, deadline=None)
def test_classes_partition_both_vocabularies(student_more: list[bytes], teacher_more: list[bytes]) -> None:
    student: list[bytes | None] = [*BYTES, *student_more, None]
    teacher: list[bytes | None] = [None, *BYTES, *teacher_more]
    classes = classes_of(student, teacher, role_pairs=[(len(student) - 1, 0)])
    # Every token of either side is in one class, and every class holds tokens of both sides.
    everything = set(range(classes.num_classes))
    assert set(classes.student_class.tolist()) == everything
    assert set(classes.teacher_class.tolist()) == everything
    # Tokens of one class begin with the same byte, so classes never mix unlike texts.
    begins = defaultdict(set)
    for table, side in ((student, classes.student_class), (teacher, classes.teacher_class)):
        for value, index in zip(table, side.tolist(), strict=True):
            begins[index].add(None if value is None else value[:1])
    assert all(len(first) == 1 for first in begins.values())
    # A token that both have is in one class.
    for value in set(student_more) & set(teacher_more):
        assert classes.student_class[student.index(value)] == classes.teacher_class[teacher.index(value)]
