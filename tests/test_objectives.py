"""Objectives and the rows they read, against float64 references and by drawing.

Shapes: N positions, K entries, V vocabulary, D hidden size.
"""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from logitstore.consumer.divergences import forward_kl_partition, sampled_cross_entropy, teacher_loss  # noqa: E402
from logitstore.consumer.objectives import parse_objective  # noqa: E402
from logitstore.consumer.primitive import HeadOutputs, head_outputs  # noqa: E402
from logitstore.consumer.rows import TeacherRows, partition_rows, sampled_rows  # noqa: E402
from logitstore.errors import ConfigError  # noqa: E402

N, V, D = 60, 507, 33


def teacher_topk(num_ids: int, temperature: float = 1.0, seed: int = 1) -> tuple[TeacherRows, Tensor]:
    """Top-k rows with two columns of fill, as decoded from a store, and the whole distribution at the temperature."""
    generator = torch.Generator().manual_seed(seed)
    logprobs_NV = torch.log_softmax(3.0 * torch.randn(N, V, dtype=torch.float64, generator=generator), -1)
    logprobs_NK, ids_NK = logprobs_NV.topk(num_ids, -1)
    log_rest_N = (logprobs_NV / temperature).scatter(1, ids_NK, -math.inf).logsumexp(-1)
    ids_NK = torch.nn.functional.pad(ids_NK, (0, 2), value=-1)
    logprobs_NK = torch.nn.functional.pad(logprobs_NK, (0, 2), value=7.0)
    rows = partition_rows(ids_NK, logprobs_NK.float(), log_rest_N.float(), temperature)
    return rows, torch.softmax(logprobs_NV / temperature, -1)


def student_logits(seed: int = 2) -> Tensor:
    return 2.0 * torch.randn(N, V, generator=torch.Generator().manual_seed(seed))


def outputs_of(logits_NV: Tensor, ids_NK: Tensor, temperature: float = 1.0) -> HeadOutputs:
    """The primitive on logits: an identity for a head."""
    return head_outputs(logits_NV, torch.eye(V, dtype=logits_NV.dtype), ids_NK, temperature=temperature)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("num_ids", [1, 5, 64])
def test_partition_kl_matches_dense_in_value_and_gradient(num_ids: int, temperature: float) -> None:
    rows, probs_NV = teacher_topk(num_ids, temperature)
    rows.validate()
    logits_NV = student_logits().requires_grad_()
    loss_N = teacher_loss(rows, outputs_of(logits_NV, rows.ids_NK, temperature), temperature)
    loss_N.sum().backward()

    dense_NV = student_logits().double().requires_grad_()
    student_NV = torch.softmax(dense_NV / temperature, -1)
    ids_NK = rows.ids_NK[:, :num_ids]
    cells = [torch.cat([x.gather(1, ids_NK), x.scatter(1, ids_NK, 0.0).sum(-1, keepdim=True)], -1)
             for x in (probs_NV, student_NV)]  # fmt: skip
    expected_N = temperature**2 * (cells[0] * (cells[0] / cells[1]).log()).sum(-1)
    expected_N.sum().backward()

    assert dense_NV.grad is not None
    torch.testing.assert_close(loss_N.double(), expected_N, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits_NV.grad, dense_NV.grad.float(), rtol=1e-5, atol=1e-6)


def test_partition_kl_is_zero_without_gradient_at_equality() -> None:
    logits_NV = student_logits().requires_grad_()
    for num_ids in (1, 5, 64, V):
        ids_NK = logits_NV.detach().topk(num_ids, -1).indices
        at_ids = outputs_of(logits_NV, ids_NK)
        rows = partition_rows(
            ids_NK,
            (at_ids.gathered_TK - at_ids.logsumexp_T[:, None]).detach(),
            (at_ids.complement_T - at_ids.logsumexp_T).detach(),
        )
        loss_N = teacher_loss(rows, at_ids)
        assert float(loss_N.detach().abs().max()) < 1e-9
        (gradient,) = torch.autograd.grad(loss_N.sum(), logits_NV)
        assert float(gradient.abs().max()) < 2e-6


@pytest.mark.parametrize("noise", [1e-6, 1e-3, 1.0, 30.0])
def test_partition_kl_is_never_negative(noise: float) -> None:
    logits_NV = student_logits()
    for num_ids in (1, 24):
        ids_NK = logits_NV.topk(num_ids, -1).indices
        teacher = outputs_of(logits_NV + noise * student_logits(3), ids_NK)
        # Quantised as a store would, and renormalised: the promise is relative to the decoded partition.
        logprobs_NK = ((teacher.gathered_TK - teacher.logsumexp_T[:, None]) / 0.05).round() * 0.05
        rows = partition_rows(ids_NK, logprobs_NK, teacher.complement_T - teacher.logsumexp_T)
        assert float(teacher_loss(rows, outputs_of(logits_NV, ids_NK)).min()) >= -1e-7


def test_partition_kl_with_masses_of_zero_and_a_rest_of_1e_minus_8() -> None:
    log_targets_NK = torch.tensor([[math.log1p(-1e-8), -math.inf, -math.inf]])
    ids_NK = torch.tensor([[3, 5, -1]])
    logits_NV = torch.zeros(1, V, requires_grad=True)
    for log_rest in (math.log(1e-8), -math.inf):
        loss_N = forward_kl_partition(log_targets_NK, torch.tensor([log_rest]), outputs_of(logits_NV, ids_NK))
        (gradient,) = torch.autograd.grad(loss_N.sum(), logits_NV)
        torch.testing.assert_close(loss_N, torch.tensor([math.log(V)]), rtol=1e-5, atol=0)
        expected = torch.full((1, V), 1 / V)
        expected[0, 3] -= 1.0
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-7)


def draw_threshold(probs_V: Tensor, theta: float, num_draws: int) -> tuple[Tensor, Tensor]:
    """Systematic PPS draws of one distribution: (kept, sampled) bool [num_draws, V]."""
    certain_V = probs_V >= theta
    ends_V = torch.where(certain_V, 0.0, probs_V / theta).cumsum(0)
    offset_N1 = torch.rand(num_draws, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts_NV = (ends_V - offset_N1).ceil()
    sampled_NV = torch.diff(counts_NV, prepend=torch.zeros(num_draws, 1)) > 0.5
    sampled_NV &= ~certain_V
    return certain_V | sampled_NV, sampled_NV


def test_sampled_cross_entropy_is_unbiased_in_value_and_gradient() -> None:
    num_draws, size, theta = 40_000, 12, 0.12
    probs_V = torch.softmax(
        1.2 * torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(4)), -1
    )
    logits_V = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    kept_NV, sampled_NV = draw_threshold(probs_V, theta, num_draws)
    ids_NK = torch.arange(size).repeat(num_draws, 1).masked_fill(~kept_NV, -1)
    rows = sampled_rows(ids_NK, probs_V.log().float().repeat(num_draws, 1), sampled_NV, theta)
    rows.validate()
    hidden_ND = logits_V.repeat(num_draws, 1).float().requires_grad_()
    student = head_outputs(hidden_ND, torch.eye(size), ids_NK)
    loss_N = teacher_loss(rows, student)
    (gradient_NV,) = torch.autograd.grad(loss_N.sum(), hidden_ND)
    log_q_V = torch.log_softmax(logits_V, -1)
    expected = -(probs_V * log_q_V).sum()
    errors = loss_N.detach().double() - expected
    assert abs(float(errors.mean())) < 4 * float(errors.std()) / math.sqrt(num_draws)
    gradient_errors_NV = gradient_NV.double() - (log_q_V.exp() - probs_V)
    bound_V = 4 * gradient_errors_NV.std(0) / math.sqrt(num_draws) + 1e-6
    assert bool((gradient_errors_NV.mean(0).abs() < bound_V).all())


def test_sampled_entries_weigh_their_draws_and_need_no_logprob() -> None:
    draws_NK = torch.tensor([[0, 3, 1, 0]])
    logprobs_NK = torch.tensor([[-0.5, math.nan, math.nan, -math.inf]])
    rows = sampled_rows(torch.tensor([[4, 1, 9, -1]]), logprobs_NK, draws_NK, 1 / 50)
    rows.validate()
    torch.testing.assert_close(rows.log_masses_NK.exp(), torch.tensor([[math.exp(-0.5), 3 / 50, 1 / 50, 0.0]]))


def test_sampled_cross_entropy_of_one_certain_token_is_token_cross_entropy() -> None:
    logits_NV = student_logits()
    realised_N = logits_NV.argmax(-1)
    outputs = outputs_of(logits_NV, realised_N[:, None])
    sampled = sampled_cross_entropy(torch.zeros(N, 1), outputs)
    torch.testing.assert_close(sampled, torch.nn.functional.cross_entropy(logits_NV, realised_N, reduction="none"))


@pytest.mark.parametrize("is_sample", [True, False])
def test_fill_and_empty_rows_change_nothing(is_sample: bool) -> None:
    rows, _ = teacher_topk(5)
    if is_sample:
        rows = sampled_rows(rows.ids_NK, rows.log_masses_NK, torch.zeros_like(rows.ids_NK, dtype=torch.bool), 0.1)
    bare = TeacherRows(rows.ids_NK[:, :5], rows.log_masses_NK[:, :5], rows.log_rest_N)
    results = []
    for some in (rows, bare):
        logits_NV = student_logits().requires_grad_()
        loss_N = teacher_loss(some, outputs_of(logits_NV, some.ids_NK))
        (gradient,) = torch.autograd.grad(loss_N.sum(), logits_NV)
        results.append((loss_N.detach(), gradient))
    torch.testing.assert_close(results[0], results[1])


def test_empty_rows_have_no_nan() -> None:
    ids_NK = torch.full((N, 3), -1)
    nothing = torch.full((N, 3), -math.inf)
    for rows in (
        partition_rows(ids_NK, nothing, torch.full((N,), -math.inf)),
        sampled_rows(ids_NK, nothing, torch.zeros(N, 3, dtype=torch.bool), 0.1),
    ):
        logits_NV = student_logits().requires_grad_()
        (gradient,) = torch.autograd.grad(teacher_loss(rows, outputs_of(logits_NV, ids_NK)).sum(), logits_NV)
        assert bool(gradient.isfinite().all())


def test_rows_that_break_their_promise_are_named() -> None:
    rows, _ = teacher_topk(5)
    assert rows.log_rest_N is not None
    twice_NK = rows.ids_NK.clone()
    twice_NK[7, 1] = twice_NK[7, 0]
    with pytest.raises(ValueError, match="row 7 of 60: an id is listed twice"):
        TeacherRows(twice_NK, rows.log_masses_NK, rows.log_rest_N).validate()
    with pytest.raises(ValueError, match="row 0 of 60: the partition does not sum to one"):
        TeacherRows(rows.ids_NK, rows.log_masses_NK - 0.1, rows.log_rest_N).validate()
    with pytest.raises(ValueError, match="int64"):
        TeacherRows(rows.ids_NK.int(), rows.log_masses_NK, rows.log_rest_N).validate()


def test_threshold_rows_refuse_another_temperature() -> None:
    rows = sampled_rows(torch.tensor([[0]]), torch.tensor([[0.0]]), torch.tensor([[False]]), 0.1)
    with pytest.raises(ConfigError, match="drawn at temperature 1"):
        sampled_rows(rows.ids_NK, rows.log_masses_NK, torch.tensor([[False]]), 0.1, temperature=2.0)
    with pytest.raises(ConfigError, match="temperature 2 cannot be served"):
        teacher_loss(rows, outputs_of(student_logits()[:1], rows.ids_NK), temperature=2.0)


def test_parse_objective_reads_names_and_weights() -> None:
    assert dict(parse_objective("kl:0.9, ce:0.1").terms) == {"kl": 0.9, "ce": 0.1}
    assert parse_objective("ce").weight("ce") == 1.0
    assert parse_objective("ce").weight("kl") == 0.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kll:1", "unknown term 'kll'; did you mean 'kl'"),
        ("margin:1", "known terms: kl, ce"),
        ("kl:-1", "expected a finite number >= 0"),
        ("kl:nan", "expected a finite number >= 0"),
        ("kl:0,ce:0", "nothing to train on"),
        ("kl:half", "'half', expected a number"),
        ("kl:1,kl:2", "there twice"),
        ("", "unknown term ''"),
    ],
)
def test_parse_objective_refuses(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_objective(text)
