"""What a student is trained on: small expressions on what ``head_outputs`` returns, one loss per position, in nats.

| term, rows        | expression                              | against the teacher's whole distribution           |
|-------------------|-----------------------------------------|----------------------------------------------------|
| ``kl``, top-k     | forward KL on {listed, rest}            | a lower bound: differences in the rest are unseen  |
| ``kl``, threshold | sum_i w_i (logsumexp - logit_i)         | unbiased cross-entropy: KL + the teacher's entropy |
| ``ce``            | logsumexp - logit of the realised token | needs no teacher                                   |

The mean over positions is left to the trainer, which knows the one global denominator.

Shapes: N positions, K entries.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from logitstore.consumer.primitive import HeadOutputs
from logitstore.consumer.rows import TeacherRows, require_unit_temperature
from logitstore.errors import ConfigError

TERMS = ("kl", "ce")

NEGLIGIBLE_LOG_MASS = -60.0
"""A teacher mass below e^-60 counts as zero: its share of a divergence is below 1e-24, and exp(log q - log p) would
overflow float32 from a log-prob of about -88 on."""


@dataclass(frozen=True)
class Objective:
    """Weights of the terms in the loss."""

    terms: Mapping[str, float]
    """Weight by name of the term, out of ``TERMS``."""

    def __post_init__(self) -> None:
        for name, weight in self.terms.items():
            if name not in TERMS:
                nearest = difflib.get_close_matches(name.lower(), TERMS, n=1, cutoff=0.3)
                hint = f"did you mean {nearest[0]!r}?" if nearest else f"known terms: {', '.join(TERMS)}"
                raise ConfigError(f"objective: unknown term {name!r}; {hint}")
            if not 0.0 <= weight < math.inf:
                raise ConfigError(f"objective: the weight of {name!r} is {weight:g}, expected a finite number >= 0")
        if not any(self.terms.values()):
            raise ConfigError("objective: no term has a positive weight, so there is nothing to train on")

    def weight(self, name: str) -> float:
        """Weight of a term, 0 if it is not there."""
        return self.terms.get(name, 0.0)


def parse_objective(text: str) -> Objective:
    """Read an objective such as ``kl:0.9,ce:0.1`` (or with ``=``, as mappings come); a name alone has weight 1.

    Raises:
        ConfigError: an unknown or repeated term, a weight that is no number or negative, or no positive weight.
    """
    terms: dict[str, float] = {}
    for part in text.split(","):
        name, sign, number = (piece.strip() for piece in part.replace("=", ":").partition(":"))
        if name in terms:
            raise ConfigError(f"objective: term {name!r} is there twice in {text!r}")
        try:
            terms[name] = float(number) if sign else 1.0
        except ValueError:
            raise ConfigError(
                f"objective: the weight of {name!r} is {number!r}, expected a number, as in kl:0.9,ce:0.1"
            ) from None
    return Objective(terms)


def forward_kl_partition(log_targets_NK: Tensor, log_rest_N: Tensor, student: HeadOutputs) -> Tensor:
    """Forward KL from teacher to student on the partition {listed entries, rest}, [N] nats.

    sum_i p_i (log p_i - log q_i) over the cells of the partition, the rest being one, with q_rest from the logsumexp of
    the complement. It is summed as p_i (log p_i - log q_i) - p_i + q_i, which is the same since both sum to 1, but is
    >= 0 for every cell; so is its gradient's part q_i - p_i zero at equality for every cell, without cancellation.

    Args:
        log_targets_NK: [N, K] log masses of the listed cells, -inf for none (0 log 0 = 0).
        log_rest_N: [N] log mass of the rest; with the listed ones it sums to 1.
        student: of the same ids, at the same temperature.
    """
    listed_NK = _divergence(log_targets_NK, student.gathered_TK - student.logsumexp_T[:, None])
    return listed_NK.sum(-1) + _divergence(log_rest_N, student.complement_T - student.logsumexp_T)


def _divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """p log(p / q) - p + q >= 0 of each cell, and q where p is 0."""
    none = log_p < NEGLIGIBLE_LOG_MASS
    # Both sides of a `where` are differentiated, so the unused side must be finite too.
    log_ratio = torch.where(none, 0.0, log_p - log_q)
    return torch.where(none, log_q.exp(), log_p.exp() * (log_ratio + torch.expm1(-log_ratio)))


def sampled_cross_entropy(log_weights_NK: Tensor, student: HeadOutputs) -> Tensor:
    """Cross-entropy to a weighted sample, sum_i w_i (logsumexp - logit_i), [N] nats.

    Linear in the weights, so unbiased for the cross-entropy to the teacher's whole distribution, in value and gradient.

    Args:
        log_weights_NK: [N, K] log of the entries' weights, -inf for none.
        student: of the same ids, at temperature 1.
    """
    nats_NK = student.logsumexp_T[:, None] - student.gathered_TK
    return (log_weights_NK.exp() * nats_NK.masked_fill(log_weights_NK == -math.inf, 0.0)).sum(-1)


def token_cross_entropy(logsumexp_N: Tensor, realised_logit_N: Tensor) -> Tensor:
    """Cross-entropy to the realised token, [N] nats: logsumexp - its logit, both at temperature 1."""
    return logsumexp_N - realised_logit_N


def teacher_loss(rows: TeacherRows, student: HeadOutputs, temperature: float = 1.0) -> Tensor:
    """The ``kl`` term, [N] nats: KL on the partition for exact rows, cross-entropy for sampled ones.

    At temperature T the KL is multiplied by T^2, in value and gradient, which keeps its gradient's size next to
    cross-entropy's (Hinton et al. 2015, section 2.1).

    Args:
        rows: the teacher's, made for this temperature.
        student: ``head_outputs`` at ``rows.ids_NK``, at this temperature.
        temperature: T.

    Raises:
        ConfigError: sampled rows with a temperature other than 1.
    """
    if rows.log_rest_N is None:
        require_unit_temperature(temperature)
        return sampled_cross_entropy(rows.log_masses_NK, student)
    return temperature**2 * forward_kl_partition(rows.log_masses_NK, rows.log_rest_N, student)
