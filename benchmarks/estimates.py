"""What a selection makes of a student's loss and gradient, in float64 against the whole distribution.

With weights w of a row and the student's distribution q, the loss is sum_i w_i (-log q_i), and its gradient at the
logits is (sum_i w_i) q - w; of the whole distribution, w is p. Policies that sample nothing are used as the partition
{listed, rest} instead, whose gradient leaves q of the rest as it is but for one factor.

Shapes: R rows, V vocabulary, D hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from logitstore.counter_random import uniform_words
from logitstore.producer.policy import Entries, Policy, Rows


def rows_of(logits_RV: Tensor, realised_R: Tensor, seed: int = 0) -> Rows:
    """Rows as scoring hands them to a policy, each with random words of its own."""
    numbers = np.arange(len(logits_RV))
    words = uniform_words(seed, np.zeros(len(numbers), np.uint64), numbers).view(np.int64)
    probs_RV = torch.softmax(logits_RV, -1, dtype=torch.float32)
    return Rows(logits_RV, probs_RV, logits_RV.argmax(-1), realised_R, torch.from_numpy(words))


def weights_of(policy: Policy, rows: Rows, entries: Entries) -> Tensor:
    """float64 [R, V]: p where kept for certain, draws * draw_weight where sampled, else 0."""
    weights_RV = torch.zeros(rows.probs_RV.shape, dtype=torch.float64)
    certain_E = rows.probs_RV[entries.row_E, entries.id_E].double()
    sampled_E = entries.draws_E * (policy.draw_weight or 0.0)
    weights_RV[entries.row_E, entries.id_E] = torch.where(entries.draws_E > 0, sampled_E, certain_E)
    return weights_RV


def with_replacement_weights(probs_RV: Tensor, num_draws: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """RS-KD as published, nothing kept for certain: weights float64 [R, V], and unique ids int64 [R]."""
    generator = torch.Generator().manual_seed(seed)
    drawn_RN = torch.multinomial(probs_RV, num_draws, replacement=True, generator=generator)
    counts_RV = torch.zeros(probs_RV.shape, dtype=torch.float64)
    counts_RV.scatter_add_(1, drawn_RN, torch.ones(drawn_RN.shape, dtype=torch.float64))
    return counts_RV / num_draws, (counts_RV > 0).sum(-1)


def sampled_gradient(weights_RV: Tensor, student_RV: Tensor) -> Tensor:
    """float64 [R, V]: gradient of the cross-entropy to weights at the student's logits."""
    return weights_RV.sum(-1, keepdim=True) * student_RV - weights_RV


def partition_gradient(probs_RV: Tensor, student_RV: Tensor, kept_RV: Tensor) -> Tensor:
    """float64 [R, V]: gradient of forward KL on {listed, rest} at the student's logits."""
    rest_p_R1 = probs_RV.masked_fill(kept_RV, 0.0).sum(-1, keepdim=True)
    rest_q_R1 = student_RV.masked_fill(kept_RV, 0.0).sum(-1, keepdim=True)
    factor_R1 = 1 - rest_p_R1 / rest_q_R1.clamp(min=1e-300)
    return torch.where(kept_RV, student_RV - probs_RV, student_RV * factor_R1)


@dataclass(frozen=True)
class Spread:
    """How far estimates stray, as means over rows. Biased estimates stray from the truth, others from their mean."""

    entries: float
    weight_sum: float
    """Mean squared error of the sum of the weights."""
    gradient: float
    """Of the gradient at the logits, summed over the vocabulary."""
    hidden: float
    """Of the gradient at the hidden state, summed over its width."""
    loss: float
    angle: float
    """Degrees between the gradient of the head on all rows and that of the whole distribution."""


@dataclass(frozen=True)
class Sums:
    """What makes a ``Spread``, summed over rows, so that chunks of rows add up.

    Attributes:
        num_rows: R.
        squares: float64 [5]: entries, and squared errors of weight sum, gradient, hidden gradient and loss.
        found_VD: float64 [V, D], gradient of the head.
        true_VD: likewise, of the whole distribution.
    """

    num_rows: int
    squares: Tensor
    found_VD: Tensor
    true_VD: Tensor

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.num_rows + other.num_rows,
            self.squares + other.squares,
            self.found_VD + other.found_VD,
            self.true_VD + other.true_VD,
        )

    def spread(self) -> Spread:
        cosine = float((self.found_VD * self.true_VD).sum() / (self.found_VD.norm() * self.true_VD.norm()))
        means = (self.squares / self.num_rows).tolist()
        return Spread(*means, angle=math.degrees(math.acos(max(-1.0, min(1.0, cosine)))))


class Truth:
    """Rows with a student's distribution, and what the teacher's whole distribution says to it."""

    def __init__(self, rows: Rows, student_logits_RV: Tensor, head_VD: Tensor, hidden_RD: Tensor) -> None:
        self.rows, self.head_VD, self.hidden_RD = rows, head_VD.double(), hidden_RD.double()
        self.probs_RV = rows.probs_RV.double()
        self.student_RV = torch.softmax(student_logits_RV.double(), -1)
        self.nats_RV = -torch.log_softmax(student_logits_RV.double(), -1)
        self.gradient_RV = sampled_gradient(self.probs_RV, self.student_RV)
        self.true_VD = self.gradient_RV.T @ self.hidden_RD

    def of_policy(self, policy: Policy) -> Sums:
        """Of a policy's entries, as a student is trained on them."""
        entries = policy.select(self.rows)
        if policy.draw_weight is not None:
            counts_R = torch.bincount(entries.row_E, minlength=len(self.probs_RV))
            return self.of_weights(weights_of(policy, self.rows, entries), counts_R)
        kept_RV = torch.zeros(self.probs_RV.shape, dtype=torch.bool)
        kept_RV[entries.row_E, entries.id_E] = True
        return self.of_partition(kept_RV)

    def of_weights(self, weights_RV: Tensor, entries_R: Tensor) -> Sums:
        """Of an estimator that weighs entries."""
        sums_R = weights_RV.sum(-1) - self.probs_RV.sum(-1)
        losses_R = ((weights_RV - self.probs_RV) * self.nats_RV).sum(-1)
        return self._sums(sampled_gradient(weights_RV, self.student_RV), entries_R, sums_R, losses_R)

    def of_partition(self, kept_RV: Tensor) -> Sums:
        """Of forward KL on {listed, rest}: its gradient strays by its bias; its loss lacks what the rest hides."""
        gradient_RV = partition_gradient(self.probs_RV, self.student_RV, kept_RV)
        hidden_p_RV, hidden_q_RV = (x.masked_fill(kept_RV, 0.0) for x in (self.probs_RV, self.student_RV))
        within_RV = hidden_p_RV * (hidden_p_RV.clamp(min=1e-300).log() + self.nats_RV)
        rest_p_R, rest_q_R = hidden_p_RV.sum(-1), hidden_q_RV.sum(-1)
        of_rest_R = rest_p_R * (rest_p_R.clamp(min=1e-300) / rest_q_R.clamp(min=1e-300)).log()
        losses_R = of_rest_R - within_RV.sum(-1)
        return self._sums(gradient_RV, kept_RV.sum(-1), torch.zeros_like(losses_R), losses_R)

    def _sums(self, gradient_RV: Tensor, entries_R: Tensor, sums_R: Tensor, losses_R: Tensor) -> Sums:
        error_RV = gradient_RV - self.gradient_RV
        squares = [entries_R, sums_R**2, (error_RV**2).sum(-1), ((error_RV @ self.head_VD) ** 2).sum(-1), losses_R**2]
        return Sums(
            len(error_RV),
            torch.stack([values_R.double().sum() for values_R in squares]),
            gradient_RV.T @ self.hidden_RD,
            self.true_VD,
        )


def certain_of(probs_RV: Tensor, realised_R: Tensor, num_likeliest: int = 1) -> Tensor:
    """bool [R, V]: the realised token and the likeliest ones."""
    certain_RV = torch.zeros(probs_RV.shape, dtype=torch.bool)
    certain_RV.scatter_(-1, probs_RV.topk(num_likeliest).indices, True)
    return certain_RV.scatter_(-1, realised_R[:, None], True)


def expected_entries(probs_RV: Tensor, certain_RV: Tensor, theta: float) -> float:
    """Mean entries a row of ``threshold:THETA``, next to others that are kept for certain."""
    certain_RV = certain_RV | (probs_RV >= theta)
    return float((certain_RV.sum(-1) + (probs_RV.double() / theta).masked_fill(certain_RV, 0.0).sum(-1)).mean())


def theta_for(probs_RV: Tensor, certain_RV: Tensor, entries: float) -> float:
    """The theta that keeps so many entries a row on these very rows, those kept for certain in any case among them."""
    low, high = math.log(1e-6), math.log(0.9)
    for _ in range(40):
        middle = (low + high) / 2
        found = expected_entries(probs_RV, certain_RV, math.exp(middle))
        low, high = (middle, high) if found > entries else (low, middle)
    return math.exp(high)
