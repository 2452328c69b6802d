"""The common partition of two vocabularies, and rows pushed forward to it.

Shapes: N positions, K entries, V vocabulary, C classes.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from logitstore.consumer.objectives import teacher_loss  # noqa: E402
from logitstore.consumer.primitive import head_outputs  # noqa: E402
from logitstore.consumer.projection import (  # noqa: E402
    VocabularyClasses,
    first_tokens,
    project_rows,
    vocabulary_classes,
)
from logitstore.consumer.rows import TeacherRows, partition_rows, sampled_rows  # noqa: E402

BYTES = [bytes([byte]) for byte in b"ab1 "]


def classes_of(student: list[bytes | None], teacher: list[bytes | None], **options: object) -> VocabularyClasses:
    return vocabulary_classes(first_tokens(student, teacher), first_tokens(teacher, student), **options)  # type: ignore[arg-type]


def test_first_tokens_takes_the_longest_prefix() -> None:
    other = [b"a", b"ab", None, b"abc", b"a", b""]
    tokens = [b"abd", b"abcd", b"a", b"x", None, b""]
    assert first_tokens(tokens, other).tolist() == [1, 3, 0, -1, -1, -1]


def test_first_tokens_believes_the_tokenizer_only_where_it_can() -> None:
    other = [b"a", b"ab", b"\xc3", b"\xc3\xa9", b" ", None]
    answers = {"ab": [0, 1], "é": [3], "a": [4, 0], "b": [5], "ax": []}
    tokens = [b"ab", "é".encode(), b"\xc3", b"a", b"b", b"ax"]
    # "ab" is cut as the tokenizer cuts it; a lone byte is no text; a space in front, a special token and an empty
    # answer are not believed.
    assert first_tokens(tokens, other, answers.__getitem__).tolist() == [0, 3, 2, 0, -1, 0]


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


@st.composite
def teacher_rows(draw: st.DrawFn) -> tuple[TeacherRows, np.ndarray]:
    vocabulary, num_ids = 14, draw(st.integers(1, 10))
    num_rows, seed = draw(st.integers(0, 4)), draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    ids_NK = np.argsort(rng.random((num_rows, vocabulary)), -1)[:, :num_ids]
    ids_NK[rng.random(ids_NK.shape) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = -1
    ids = torch.from_numpy(ids_NK.astype(np.int64))
    logprobs_NK = torch.from_numpy(rng.normal(-4, draw(st.sampled_from([1.0, 60.0])), ids_NK.shape)).float()
    logprobs_NK = logprobs_NK.clamp(max=0)
    teacher_class = rng.integers(-1, draw(st.integers(1, 8)), vocabulary)
    if draw(st.booleans()):
        rows = partition_rows(ids, logprobs_NK, torch.from_numpy(rng.normal(-6, 2, num_rows)).float())
    else:
        rows = sampled_rows(ids, logprobs_NK, torch.from_numpy(rng.random(ids_NK.shape) < 0.5), 0.1)
    return rows, teacher_class.astype(np.int32)


@given(teacher_rows())
@settings(max_examples=200, deadline=None)
def test_project_rows_matches_a_loop(drawn: tuple[TeacherRows, np.ndarray]) -> None:
    rows, teacher_class = drawn
    projected = project_rows(rows, torch.from_numpy(teacher_class))
    projected.validate()
    assert projected.is_sample == rows.is_sample
    for n in range(len(rows.ids_NK)):
        masses: dict[int, list[float]] = defaultdict(list)
        for token, log_mass in zip(rows.ids_NK[n].tolist(), rows.log_masses_NK[n].tolist(), strict=True):
            masses[-1 if token < 0 else int(teacher_class[token])].append(log_mass)
        lost = masses.pop(-1, [])
        ids = projected.ids_NK[n].tolist()
        assert ids == sorted(masses) + [-1] * (len(ids) - len(masses))
        expected = [float(torch.tensor(masses[c], dtype=torch.float64).logsumexp(0)) for c in sorted(masses)]
        expected += [-math.inf] * (len(ids) - len(masses))
        assert projected.log_masses_NK[n].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
        if rows.log_rest_N is not None and projected.log_rest_N is not None:
            rest = torch.tensor([float(rows.log_rest_N[n]), *lost], dtype=torch.float64).logsumexp(0)
            assert float(projected.log_rest_N[n]) == pytest.approx(float(rest), rel=1e-5, abs=1e-5)


def test_divergence_between_vocabularies_is_zero_at_agreement() -> None:
    student: list[bytes | None] = [*BYTES, b"ab", b"11", b"a1b"]
    teacher: list[bytes | None] = [*BYTES, b"aba", b"1a"]
    classes = classes_of(student, teacher)
    groups, teacher_class = (torch.from_numpy(x).long() for x in (classes.student_class, classes.teacher_class))
    logprobs_NV = torch.log_softmax(torch.randn(1, len(teacher), generator=torch.Generator().manual_seed(0)), -1)
    rows = partition_rows(torch.arange(len(teacher))[None], logprobs_NV, torch.tensor([-math.inf]))
    projected = project_rows(rows, teacher_class)
    # A student whose distribution, pushed forward, is the teacher's: the mass of each class shared by its members.
    by_class_C = torch.zeros(classes.num_classes).index_add_(0, teacher_class, logprobs_NV[0].exp())
    hidden = (by_class_C[groups] / groups.bincount()[groups]).log()[None].requires_grad_()
    loss = teacher_loss(projected, head_outputs(hidden, torch.eye(len(student)), projected.ids_NK, groups=groups))
    (gradient,) = torch.autograd.grad(loss.sum(), hidden)
    assert float(loss.detach()) < 1e-6
    assert float(gradient.abs().max()) < 1e-6
