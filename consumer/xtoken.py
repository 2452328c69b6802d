"""X-Token's objectives on stored rows: the student seen in the teacher's vocabulary (arXiv 2605.21699).

``xtoken_pkl`` projects the student's whole distribution through W, the sparse matrix of weighted pieces, and compares
it with the teacher's there. ``xtoken_hkl`` is ``gold`` with looser pairs: tokens that W takes for nearly the same.

Where NeMo-RL's differ from these:

- they average log-probs over a chunk's tokens, and probabilities on the student's side, so that two identical chunks of
  several tokens do not have divergence 0 (P-KL found at -0.34); here a chunk is compared where it begins, on
  distributions, and its further tokens are left to other terms;
- P-KL keeps 8,192 columns of the microbatch's largest teacher logits and renormalises both sides on them, so that what
  a token costs depends on its neighbours in the microbatch; here what is not stored is one cell, the rest;
- the mean is over the chunks of a microbatch, which weighs the term by how often gradients are accumulated; here there
  is one number a position, and one denominator.

Shapes: N positions, K stored entries, U teacher vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from logitstore.consumer.divergences import teacher_loss
from logitstore.consumer.gold import GoldRows, gold
from logitstore.consumer.primitive import HeadOutputs
from logitstore.consumer.projection import class_of
from logitstore.consumer.rows import TeacherRows


def reachable_rows(rows: TeacherRows, reachable_U: Tensor) -> TeacherRows:
    """Rows without the entries that no student token is projected to; what they weigh joins the rest.

    A student could earn nothing there, and would be charged without limit. In a sample, which has no rest, they are
    left out of the sum.

    Args:
        rows: over the teacher's vocabulary.
        reachable_U: bool, ``SparseProjection.reachable``.
    """
    is_out_NK = class_of(rows.ids_NK, reachable_U.long() - 1) < 0
    log_rest_N = rows.log_rest_N
    if log_rest_N is not None:
        lost_N = rows.log_masses_NK.masked_fill(~is_out_NK, -math.inf).logsumexp(-1)
        log_rest_N = torch.logaddexp(log_rest_N, lost_N)
    return replace(
        rows,
        ids_NK=rows.ids_NK.masked_fill(is_out_NK, -1),
        log_masses_NK=rows.log_masses_NK.masked_fill(is_out_NK, -math.inf),
        log_rest_N=log_rest_N,
    )


def xtoken_pkl(rows: TeacherRows, student: HeadOutputs, temperature: float = 1.0) -> Tensor:
    """P-KL: forward KL from the teacher to the projected student q~(u) = sum_s q(s) W[s, u], [N] nats.

    On {stored entries, rest}, where it is a divergence: >= 0, and 0 exactly when the projected student agrees on every
    cell. Top-k rows give a lower bound of the KL over all of U; rows of a sample the unbiased cross-entropy to it.

    Args:
        rows: over the teacher's vocabulary, of ``reachable_rows``.
        student: of ``rows.ids_NK``, with ``projection`` W, at this temperature.
        temperature: T; exact rows are multiplied by T^2.

    Raises:
        ConfigError: sampled rows at a temperature other than 1.
    """
    return teacher_loss(rows, student, temperature)


def xtoken_hkl(
    rows: GoldRows, student: HeadOutputs, continuation_logp_N: Tensor | None = None, *, temperature: float = 1.0
) -> Tensor:
    """H-KL: forward KL on the loosely matched tokens and sorted L1 on the others, [N]; refused for sampled rows.

    Args:
        rows: of ``gold_rows``, with the pairs of ``relaxed_matching``.
        student: as for ``gold``, with the same pairs.
        continuation_logp_N: as for ``gold``.
        temperature: of the rows and the student.
    """
    return gold(rows, student, continuation_logp_N, temperature=temperature)
