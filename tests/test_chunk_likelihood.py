"""Likelihood matching on chunks, against float64 references and hand-made cases.

Shapes: N tokens, C chunks.
"""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from logitstore.consumer.chunk_likelihood import (  # noqa: E402
    boundary_subset,
    chunk_likelihood,
    debiased,
    log1mexp,
    sum_by_chunk,
)
from logitstore.consumer.primitive import head_outputs  # noqa: E402
from logitstore.errors import ConfigError  # noqa: E402


def coins(teacher_logp: float, student_logp: float, tau: float) -> float:
    """The definition, in float64."""
    p, q = math.exp(teacher_logp / tau), math.exp(student_logp / tau)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


@pytest.mark.parametrize("tau", [1.0, 7.0, 100.0])
def test_loss_equals_the_kl_of_two_coins(tau: float) -> None:
    teacher = [-0.3, -4.0, -25.0, -0.01, -60.0]
    student = [-0.2, -9.0, -3.0, -0.5, -59.0]
    loss_C = chunk_likelihood(torch.tensor(teacher), torch.tensor(student), tau)
    expected = torch.tensor([coins(*pair, tau) for pair in zip(teacher, student, strict=True)])
    torch.testing.assert_close(loss_C, expected, rtol=1e-4, atol=1e-8)


def test_a_coin_of_known_bias() -> None:
    # Teacher 1/2, student 1/4, at tau 1: 1/2 log 2 + 1/2 log(2/3).
    loss_C = chunk_likelihood(torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)]), 1.0)
    torch.testing.assert_close(loss_C, torch.tensor([0.5 * math.log(2.0) + 0.5 * math.log(2.0 / 3.0)]))


@pytest.mark.parametrize("tau", [1.0, 100.0])
def test_loss_and_gradient_are_zero_at_equality_and_finite_everywhere(tau: float) -> None:
    logp_C = torch.tensor([0.0, -1e-9, -1e-6, -1e-3, -0.5, -30.0, -500.0, -20_000.0])
    student_C = logp_C.clone().requires_grad_()
    loss_C = chunk_likelihood(logp_C, student_C, tau)
    (gradient_C,) = torch.autograd.grad(loss_C.sum(), student_C)
    assert bool((loss_C == 0.0).all())
    assert bool((gradient_C == 0.0).all())
    pairs = torch.cartesian_prod(logp_C, logp_C)
    student_P = pairs[:, 1].clone().requires_grad_()
    loss_P = chunk_likelihood(pairs[:, 0], student_P, tau)
    (gradient_P,) = torch.autograd.grad(loss_P.sum(), student_P)
    assert bool(loss_P.isfinite().all() & gradient_P.isfinite().all())
    assert float(loss_P.detach().min()) >= 0.0
    # The loss falls towards the teacher's likelihood, from either side.
    towards = (student_P - pairs[:, 0]).detach() * gradient_P
    assert float(towards.min()) >= 0.0


def test_gradcheck_in_float64() -> None:
    torch.manual_seed(0)
    teacher_C = -torch.rand(7, dtype=torch.float64) * 20
    student_C = (-torch.rand(7, dtype=torch.float64) * 20).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: chunk_likelihood(teacher_C, x, 5.0), student_C)
    assert torch.autograd.gradcheck(log1mexp, student_C)


@pytest.mark.parametrize("x", [-1e-9, -1e-4, -0.5, -0.6931, -0.6932, -3.0, -40.0, -80.0])
def test_log1mexp_is_precise_at_both_ends(x: float) -> None:
    value = log1mexp(torch.tensor([x]))
    expected = math.log(-math.expm1(x)) if x > -1 else math.log1p(-math.exp(x))
    torch.testing.assert_close(value, torch.tensor([expected]), rtol=1e-6, atol=0)


def test_great_tau_tends_to_the_divergence_of_log_likelihoods() -> None:
    x, y, tau = 12.0, 3.0, 1e5
    loss_C = chunk_likelihood(-torch.tensor([x], dtype=torch.float64), -torch.tensor([y], dtype=torch.float64), tau)
    assert float(loss_C) * tau == pytest.approx(x * math.log(x / y) - x + y, rel=1e-3)


def test_spans_of_each_kind_are_summed_by_chunk() -> None:
    # Teacher and student tokens of four spans: 1:1, 1:2, 2:1, 2:2; the student's last token is in no span.
    teacher_N = torch.tensor([-1.0, -2.0, -0.25, -0.5, -3.0, -4.0])
    student_N = torch.tensor([-1.0, -1.5, -0.5, -0.75, -2.0, -5.0, -math.inf])
    teacher_C = sum_by_chunk(teacher_N, torch.tensor([0, 1, 2, 2, 3, 3]), 4)
    student_C = sum_by_chunk(student_N, torch.tensor([0, 1, 1, 2, 3, 3, -1]), 4)
    assert teacher_C.tolist() == [-1.0, -2.0, -0.75, -7.0]
    assert student_C.tolist() == [-1.0, -2.0, -0.75, -7.0]
    assert chunk_likelihood(teacher_C, student_C).tolist() == [0.0] * 4


def test_tokens_of_no_chunk_get_no_gradient() -> None:
    values_N = torch.tensor([1.0, math.inf, 2.0], requires_grad=True)
    sum_by_chunk(values_N, torch.tensor([1, -1, 1]), 3).sum().backward()
    assert values_N.grad is not None
    assert values_N.grad.tolist() == [1.0, 0.0, 1.0]


def test_no_chunks_give_no_losses() -> None:
    empty: Tensor = torch.zeros(0)
    assert sum_by_chunk(empty, torch.zeros(0, dtype=torch.int64), 0).shape == (0,)
    assert chunk_likelihood(empty, empty).shape == (0,)


def test_boundary_of_a_student_is_white_space_punctuation_or_an_end() -> None:
    token_bytes = [None, b" the", b"the", b"\n", b".", b"_x", "\u00e9".encode(), None]
    subset_GV = boundary_subset(token_bytes, frozenset({0}), 10)
    assert subset_GV.dtype == torch.bool
    assert subset_GV.tolist() == [[True, True, False, True, True, False, False, False, False, False]]


def test_a_chunk_and_its_boundary_from_the_head_alone() -> None:
    # Four student tokens in two chunks; the next row after each says how probable a boundary was there.
    torch.manual_seed(0)
    hidden_TD, head_VD = torch.randn(5, 3), torch.randn(6, 3, requires_grad=True)
    realised_T = torch.tensor([1, 4, 0, 2, 3])
    subset_GV = torch.tensor([[True, False, False, True, False, True]])
    no_ids = torch.full((5, 1), -1)
    outputs = head_outputs(hidden_TD, head_VD, no_ids, realised_T=realised_T, subsets_GV=subset_GV)
    assert outputs.realised_T is not None
    assert outputs.subsets_TG is not None
    logp_T = outputs.realised_T - outputs.logsumexp_T
    boundary_C = (outputs.subsets_TG[:, 0] - outputs.logsumexp_T)[torch.tensor([2, 4])]
    student_C = sum_by_chunk(logp_T, torch.tensor([0, 0, 1, 1, -1]), 2) + boundary_C
    q_TV = torch.softmax(hidden_TD.double() @ head_VD.detach().double().T, -1)
    by_token = q_TV.gather(1, realised_T[:, None])[:, 0].log()
    expected = [
        by_token[:2].sum() + q_TV[2, [0, 3, 5]].sum().log(),
        by_token[2:4].sum() + q_TV[4, [0, 3, 5]].sum().log(),
    ]
    torch.testing.assert_close(student_C.detach().double(), torch.stack(expected), rtol=1e-5, atol=1e-6)
    chunk_likelihood(torch.tensor([-3.0, -4.0]), student_C).sum().backward()
    assert head_VD.grad is not None
    assert bool(head_VD.grad.isfinite().all())


def test_chunks_whose_end_a_side_forbids_are_left_out() -> None:
    teacher_C = torch.tensor([0.0, math.log(0.5), math.log(0.05), math.log(0.9)])
    student_C = torch.tensor([0.0, math.log(0.01), math.log(0.5), math.log(0.11)])
    assert debiased(teacher_C).tolist() == [True, True, False, True]
    assert debiased(teacher_C, student_C).tolist() == [True, False, False, True]
    assert debiased(teacher_C, student_C, threshold=0.01).tolist() == [True, True, True, True]


@pytest.mark.parametrize("tau", [0.0, -1.0, math.inf, math.nan])
def test_a_tau_that_is_no_temperature_is_refused(tau: float) -> None:
    with pytest.raises(ConfigError, match="expected a positive number"):
        chunk_likelihood(torch.zeros(1), torch.zeros(1), tau)
