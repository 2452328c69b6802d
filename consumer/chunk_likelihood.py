"""Approximate likelihood matching (ALM): how probable both models find the same stretches of text.

Between two boundaries that both tokenisations share, teacher and student give the same bytes a probability each, the
product of their tokens'. ALM compares those two numbers as one would two coins (Minixhofer, Vulic and Ponti 2025,
arXiv 2503.20083): all it needs of the teacher is the log-prob of each realised token, and that of a boundary after it.

It is the KL of a two-cell partition {this chunk, anything else} of the outcomes, so it is >= 0 and 0 at equality of the
two likelihoods; it does not see how either model spreads what is left.

A model that could still go on within the chunk's last word has put less into that end than one whose tokens must stop
there. Two remedies are the paper's: the log-mass of tokens that start at a boundary is added to the chunk's likelihood,
on both sides; and chunks without such an end are not compared (``debiased``).

Shapes: N tokens, C chunks. Log-likelihoods in nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from logitstore.consumer.divergences import cell_divergence
from logitstore.errors import ConfigError
from logitstore.token_starts import start_masks

DEFAULT_TAU = 100.0
"""The paper's temperature of the coins. As tau grows, tau times the loss tends to the I-divergence of the two negative
log-likelihoods, x_T log(x_T / x_S) - x_T + x_S, so that long chunks of tiny probability still teach something."""

CERTAIN_NATS = -1e-6
"""A log-likelihood above this counts as this. Logits near 16 are rounded to 1e-6 in float32, and the odds of a coin
that always falls on one side are infinite."""

BOUNDARY_THRESHOLD = 0.1
"""tokenkit's ``tokenizer_pair_bias_threshold``: the least probability of a boundary where a chunk may end."""


def chunk_likelihood(teacher_logp_C: Tensor, student_logp_C: Tensor, tau: float = DEFAULT_TAU) -> Tensor:
    """KL between coins of bias p_T^(1/tau) and p_S^(1/tau), [C] nats.

    With a = l_T / tau and b = l_S / tau it is e^a (a - b) + (1 - e^a) (log(1 - e^a) - log(1 - e^b)). tokenkit minimises
    the cross-entropy of the coins instead, whose gradient is the same and whose minimum is the teacher coin's entropy;
    and it shifts both likelihoods by 1e-6 after the division, which at tau = 100 is 1e-4 nats.

    The gradient is of order 1 / tau; next to terms in nats per token, weigh it accordingly.

    Args:
        teacher_logp_C: log-likelihoods of the chunks, from ``sum_by_chunk``, each plus the log-mass of a boundary.
        student_logp_C: the same of the student, which gradients flow to.
        tau: temperature of the coins.

    Raises:
        ConfigError: tau is not positive.
    """
    if not 0.0 < tau < math.inf:
        raise ConfigError(f"chunk_likelihood: tau is {tau:g}, expected a positive number, such as {DEFAULT_TAU:g}")
    log_p_C, log_q_C = (
        logp_C.to(torch.promote_types(logp_C.dtype, torch.float32)).clamp(max=CERTAIN_NATS) / tau
        for logp_C in (teacher_logp_C, student_logp_C)
    )
    return cell_divergence(log_p_C, log_q_C) + cell_divergence(log1mexp(log_p_C), log1mexp(log_q_C))


def log1mexp(log_p: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0, precise at both ends (Maechler 2012, log1mexp in the R package Rmpfr)."""
    is_small = log_p < -math.log(2.0)
    # Both sides of a `where` are differentiated, so each gets arguments at which its derivative is finite.
    for_small, for_large = log_p.where(is_small, -1.0), log_p.where(~is_small, -1.0)
    return torch.where(is_small, torch.log1p(-for_small.exp()), torch.log(-torch.expm1(for_large)))


def boundary_subset(token_bytes: Sequence[bytes | None], special_ids: frozenset[int], head_rows: int) -> Tensor:
    """Student tokens that start at a boundary, bool [1, V], for ``subsets_GV`` of ``head_outputs``.

    By the rule of the teacher's ``starts@`` scalars, whose logsumexp over the classes is the teacher's side of it.

    Args:
        token_bytes: of the student's tokenizer.
        special_ids: of its special tokens, which end a text or a turn.
        head_rows: V.
    """
    return torch.from_numpy(start_masks(token_bytes, special_ids, head_rows).any(axis=1))[None]


def sum_by_chunk(values_N: Tensor, chunk_of_N: Tensor, num_chunks: int) -> Tensor:
    """[C] sums of the values of each chunk's tokens.

    Args:
        values_N: log-probs of realised tokens, for one; what stands at tokens of no chunk is ignored, even infinities.
        chunk_of_N: int64 chunk of each token, -1 for none.
        num_chunks: C.
    """
    none_N = chunk_of_N < 0
    sums_C = values_N.new_zeros(num_chunks + 1)
    return sums_C.index_add(0, chunk_of_N.where(~none_N, num_chunks), values_N.masked_fill(none_N, 0.0))[:-1]


def debiased(
    teacher_boundary_logp_C: Tensor,
    student_boundary_logp_C: Tensor | None = None,
    threshold: float = BOUNDARY_THRESHOLD,
) -> Tensor:
    """Which chunks can be compared, bool [C]: those whose end both tokenisations allow.

    The probability that the next token starts at a boundary, after the chunk's last, tells whether the model takes the
    text for ended there: where it is near 0, a token that went on would have been the tokenizer's choice, and its mass
    is missing from the chunk (outcome chunk debiasing in arXiv 2503.20083; ``merge_by_space_prob`` in tokenkit, which
    looks at the teacher alone, and joins such a chunk with the next, where here it is left out).

    Args:
        teacher_boundary_logp_C: log-mass of tokens that start at a boundary after each chunk, nats; 0 at a text's end.
        student_boundary_logp_C: the same of the student. Note that a student may leave a chunk out by its own error,
            and then is not taught better by it.
        threshold: least probability.
    """
    is_end_C = teacher_boundary_logp_C >= math.log(threshold)
    if student_boundary_logp_C is not None:
        is_end_C = is_end_C & (student_boundary_logp_C.detach() >= math.log(threshold))
    return is_end_C
