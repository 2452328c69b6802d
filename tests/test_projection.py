"""A teacher's rows pushed forward to the classes that it shares with a student.

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

from logitstore.consumer.divergences import teacher_loss  # noqa: E402
from logitstore.consumer.primitive import head_outputs  # noqa: E402
from logitstore.consumer.projection import project_rows  # noqa: E402
from logitstore.consumer.rows import TeacherRows, partition_rows, sampled_rows  # noqa: E402
from logitstore.token_cuts import cut_tokens  # noqa: E402
from logitstore.vocabulary_classes import vocabulary_classes  # noqa: E402

BYTES = [bytes([byte]) for byte in b"ab1 "]


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
    classes = vocabulary_classes(cut_tokens(student, teacher).first, cut_tokens(teacher, student).first)
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
