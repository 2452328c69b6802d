"""Estimators: unbiased ones are, in weights, loss and gradient; at equal entries the threshold strays least.

Every policy is drawn tens of thousands of times from one distribution, and compared in float64.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from estimates import (
    Truth,
    certain_of,
    partition_gradient,
    rows_of,
    sampled_gradient,
    theta_for,
    weights_of,
    with_replacement_weights,
)

from logitstore.producer.policy import Policy, Rows
from logitstore.producer.selection import Sample, Threshold, TopK, TopP, Union

_DRAWS, V, _D = 12_000, 300, 16
_SAMPLING = [
    Threshold(0.02),
    Threshold(0.2),
    Sample(50),
    Sample(1),
    Union((TopK(8), Threshold(0.05))),
    Union((TopK(4), Sample(30))),
    Union((TopP(0.5, 20), Sample(12))),
]


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _repeated(scale: float, seed: int = 0) -> Rows:
    """One distribution, drawn from many times; an unlikely token is the realised one."""
    logits_V = scale * _normal(V, seed=seed)
    return rows_of(logits_V.expand(_DRAWS, V), torch.full((_DRAWS,), int(logits_V.argsort()[V // 4])))


def _mean_is(samples_N: Tensor, expected: Tensor | float) -> Tensor:
    """How many standard errors the mean of many draws lies from what is expected."""
    error = samples_N.std(0) / len(samples_N) ** 0.5
    return ((samples_N.mean(0) - expected).abs() - 1e-6).clamp(min=0) / error.clamp(min=1e-9)


@pytest.mark.parametrize("scale", [1.0, 2.5], ids=["flat", "peaked"])
@pytest.mark.parametrize("policy", _SAMPLING, ids=str)
def test_sampling_policies_are_unbiased(policy: Policy, scale: float) -> None:
    rows = _repeated(scale)
    weights_NV = weights_of(policy, rows, policy.select(rows))
    probs_V = rows.probs_RV[0].double()
    assert policy.draw_weight is not None
    often_V = probs_V > 40 * policy.draw_weight / _DRAWS
    # An entry is hit p / draw_weight times on average, so p * draw_weight bounds its variance; what is hit too rarely
    # to tell is told in sum. The largest of 300 deviations is beyond 4.5 once in 500 runs; the draws are fixed.
    errors_V = (weights_NV.mean(0) - probs_V).abs() / (probs_V * policy.draw_weight / _DRAWS).sqrt()
    assert float(errors_V[often_V].max()) < 4.5
    assert float(_mean_is(weights_NV[:, ~often_V].sum(-1), float(probs_V[~often_V].sum()))) < 4
    student_V = torch.softmax(1.3 * _normal(V, seed=1).double(), -1)
    losses_N = weights_NV @ -student_V.log()
    assert float(_mean_is(losses_N, float(probs_V @ -student_V.log()))) < 4
    directions_VD = _normal(V, _D, seed=2).double()
    gradients_ND = sampled_gradient(weights_NV, student_V[None]) @ directions_VD
    assert float(_mean_is(gradients_ND, (student_V - probs_V) @ directions_VD).max()) < 4


@pytest.mark.parametrize("policy", _SAMPLING, ids=str)
def test_what_is_certain_is_always_there_and_weighs_p(policy: Policy) -> None:
    rows = _repeated(2.0)
    weights_NV = weights_of(policy, rows, policy.select(rows))
    probs_V = rows.probs_RV[0].double()
    kept = policy.keep(Rows(*(values[:1] for values in rows[:5]))).tolist()
    for token in {int(rows.realised_R[0]), int(rows.argmax_R[0]), *kept}:
        torch.testing.assert_close(weights_NV[:, token], probs_V[token].expand(_DRAWS))


def _mixed_rows(scale: float) -> tuple[Truth, Rows]:
    """Rows that differ, a student that has learned something, hidden states and a head."""
    num_rows = 3000
    hidden_RD, head_VD = _normal(num_rows, _D, seed=3), _normal(V, _D, seed=4)
    logits_RV = scale * (hidden_RD @ head_VD.T) / _D**0.5
    realised_R = torch.multinomial(torch.softmax(logits_RV, -1), 1, generator=torch.Generator().manual_seed(5))[:, 0]
    rows = rows_of(logits_RV, realised_R)
    return Truth(rows, 0.6 * logits_RV + 0.5 * _normal(num_rows, V, seed=6), head_VD, hidden_RD), rows


# Where a flat distribution is drawn from a dozen times, hardly an id is drawn twice, and there is little to win.
@pytest.mark.parametrize(
    ("scale", "num_draws", "margin"),
    [(2.0, 12, 0.97), (2.0, 50, 0.75), (3.5, 12, 0.75), (3.5, 50, 0.5)],
    ids=["flat-12", "flat-50", "peaked-12", "peaked-50"],
)
def test_threshold_strays_less_than_draws_with_replacement_at_equal_entries(
    scale: float, num_draws: int, margin: float
) -> None:
    truth, rows = _mixed_rows(scale)
    published_RV, unique_R = with_replacement_weights(rows.probs_RV, num_draws)
    published = truth.of_weights(published_RV, unique_R).spread()
    theta = theta_for(rows.probs_RV, certain_of(rows.probs_RV, rows.realised_R), published.entries)
    threshold, sample = (truth.of_policy(policy).spread() for policy in (Threshold(theta), Sample(num_draws)))
    assert threshold.entries == pytest.approx(published.entries, rel=0.03)
    assert published.weight_sum < 1e-12, "all draws of RS-KD weigh 1 together"
    assert threshold.weight_sum < theta**2 / 4
    for name in ("gradient", "hidden", "loss"):
        assert getattr(threshold, name) < margin * getattr(published, name), name
    assert threshold.angle < published.angle
    # Keeping the realised token and the argmax for certain costs entries; it does not cost variance of the gradient.
    assert sample.gradient < published.gradient


def test_likeliest_tokens_alone_point_elsewhere() -> None:
    """At equal entries the gradient of a partition is off by its bias; that of draws by noise, which averages out."""
    truth, rows = _mixed_rows(2.0)
    threshold = Threshold(theta_for(rows.probs_RV, certain_of(rows.probs_RV, rows.realised_R), 12.0))
    weights = []
    for seed in range(40):
        again = rows_of(rows.logits_RV, rows.realised_R, seed)
        weights.append(weights_of(threshold, again, threshold.select(again)))
    twelve = torch.full((1,), 12)
    once = truth.of_weights(weights[0], twelve).spread()
    often = truth.of_weights(torch.stack(weights).mean(0), twelve).spread()
    assert often.angle < once.angle / 5
    assert often.gradient < once.gradient / 30
    for policy in (TopK(12), TopP(0.9, 12)):
        assert truth.of_policy(policy).spread().angle > 2 * often.angle


def test_union_with_likeliest_tokens_strays_less_than_draws_alone() -> None:
    truth, _ = _mixed_rows(3.5)
    alone, union = (truth.of_policy(policy).spread() for policy in (Sample(30), Union((TopK(8), Sample(30)))))
    assert union.gradient < 0.7 * alone.gradient


def test_partition_gradient_is_that_of_its_loss() -> None:
    probs_RV = torch.softmax(_normal(4, 20, seed=7).double(), -1)
    logits_RV = _normal(4, 20, seed=8).double().requires_grad_()
    kept_RV = _normal(4, 20, seed=9) > 0.3
    student_RV = torch.softmax(logits_RV, -1)
    rest_p, rest_q = (x.masked_fill(kept_RV, 0.0).sum(-1) for x in (probs_RV, student_RV))
    listed = (probs_RV * (probs_RV / student_RV).log()).masked_fill(~kept_RV, 0.0).sum()
    (expected,) = torch.autograd.grad(listed + (rest_p * (rest_p / rest_q).log()).sum(), logits_RV)
    torch.testing.assert_close(partition_gradient(probs_RV, student_RV.detach(), kept_RV), expected)
