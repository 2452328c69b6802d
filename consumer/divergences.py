"""Divergences between a teacher's stored row and what ``head_outputs`` says of its cells: one number a position, nats.

A cell is a token, a class of tokens, a projected token or the rest; all that counts is that the cells of both sides are
the same events and that they cover everything.

Shapes: N positions, K entries.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from logitstore.consumer.primitive import HeadOutputs
from logitstore.consumer.rows import TeacherRows, require_unit_temperature

NEGLIGIBLE_LOG_MASS = -60.0
"""A teacher mass below e^-60 counts as zero: its share of a divergence is below 1e-24, and exp(log q - log p) would
overflow float32 from a log-prob of about -88 on."""


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
    listed_NK = cell_divergence(log_targets_NK, student.gathered_TK - student.logsumexp_T[:, None])
    return listed_NK.sum(-1) + cell_divergence(log_rest_N, student.complement_T - student.logsumexp_T)


def cell_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """p log(p / q) - p + q >= 0 of each cell, and q where p is 0; over a partition they sum to the KL."""
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


def rest_cross_entropy(log_rest_N: Tensor, student: HeadOutputs) -> Tensor:
    """p_rest (logsumexp - complement), [N] nats: the part of a sample that is known to be on no listed cell."""
    none_N = log_rest_N < NEGLIGIBLE_LOG_MASS
    nats_N = (student.logsumexp_T - student.complement_T).masked_fill(none_N | (student.complement_T == -math.inf), 0.0)
    return log_rest_N.exp() * nats_N


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
