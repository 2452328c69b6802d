"""Distances that pair tokens by rank (``uld``), or by bytes where they can and by rank where not (``gold``).

A stored row lists a teacher's largest probabilities and not all of them, so what pairs by rank is a lower bound here;
how far it can be off is said with each. It needs top-k or top-p rows: of a sample, or of ids that somebody gave, ranks
are unknown, and a sample is refused.

A span of bytes that the teacher writes as x_1 x_2 and the student as y_1 is one event of both:

- the teacher's mass of it is P(x_1) P(x_2 | x_1), and what x_1 has beyond that, P(x_1) (1 - P(x_2 | x_1)), goes to the
  rest, so that the row still sums to one;
- the student's y_1 is split in the same way where it is the student that needs more tokens.

TRL's GOLD (``_merge_probabilities_with_alignment_groups``) multiplies *every* entry of the first row with the realised
continuation by default ("observed"), as if x_2 followed each of them as readily, so the row no longer sums to one; and
it takes each factor from the row one further on, P(x_3 | x_1 x_2) for P(x_2 | x_1). Since TRL 5905 "bayesian" reads the
right rows, and takes the last one with the probability of what came before: neither sums to one.

Shapes: N positions, K stored entries, M >= K largest student logits, V student vocabulary, U teacher vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from logitstore.consumer.chunk_likelihood import log1mexp
from logitstore.consumer.divergences import cell_divergence, forward_kl_partition
from logitstore.consumer.matching import TokenMatching
from logitstore.consumer.primitive import HeadOutputs
from logitstore.consumer.projection import class_of
from logitstore.consumer.rows import TeacherRows
from logitstore.errors import ConfigError

NO_MASS = -1e4
"""Stands for the log of no mass in a mixture: its exp is 0, and unlike that of -inf its gradient is not nan."""


def uld(rows: TeacherRows, student: HeadOutputs) -> Tensor:
    """L1 distance of the two sorted distributions, [N], a number in 0..2 (Boizard et al. 2024, arXiv 2402.12030).

    With p and q sorted in descending order, and J of the teacher's order statistics known, it is
    sum_{i <= J} |p_i - q_i| + |sum_{i <= J} (p_i - q_i)|. The last is what the two tails differ by in mass, and so, by
    the triangle inequality, a lower bound of the tails' own distance: what is missing is at most twice the smaller
    tail's mass. It is exact where either tail is empty.

    The realised token is stored whatever its rank; where it is the least of a row its rank is unknown, and it is
    counted with the tail.

    Args:
        rows: top-k or top-p rows over the teacher's vocabulary, not projected.
        student: with ``num_top`` M >= K, of all entries: ``ids_TK`` all -1.

    Raises:
        ConfigError: sampled rows.
    """
    _require_order_statistics(rows, "uld")
    log_p_NK = rows.log_masses_NK
    others_N = _least(log_p_NK[:, 1:])
    is_unranked_N = (log_p_NK[:, 0] <= others_N) & (others_N < math.inf)
    log_p_NK = torch.cat([log_p_NK[:, :1].masked_fill(is_unranked_N[:, None], -math.inf), log_p_NK[:, 1:]], -1)
    log_p_NK = log_p_NK.sort(dim=-1, descending=True).values
    q_NK = _top_probabilities(student, log_p_NK.shape[1])[:, : log_p_NK.shape[1]]
    difference_NK = (log_p_NK.exp() - q_NK).masked_fill(log_p_NK == -math.inf, 0.0)
    return difference_NK.abs().sum(-1) + difference_NK.sum(-1).abs()


@dataclass(frozen=True)
class GoldRows:
    """A teacher's rows, cut for ``gold``: pairs by bytes, and the masses of what has no pair."""

    matched: TeacherRows
    """Over student tokens: column 0 the span's first, then matched entries; the rest is everything else."""
    unmatched_NK: Tensor
    """[N, K] log masses of listed entries without a pair, in descending order; -inf is fill."""
    ceiling_N: Tensor
    """[N] log of what no unlisted entry exceeds."""
    num_entries_N: Tensor
    """[N] int64, entries of the row: so many of the student's ranks are compared, however wide the batch is."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> GoldRows:
        """The same rows on another device."""
        return GoldRows(
            self.matched.to(device, non_blocking=non_blocking),
            self.unmatched_NK.to(device, non_blocking=non_blocking),
            self.ceiling_N.to(device, non_blocking=non_blocking),
            self.num_entries_N.to(device, non_blocking=non_blocking),
        )


def gold_rows(
    rows: TeacherRows, matching: TokenMatching, realised_N: Tensor, continuation_logp_N: Tensor | None = None
) -> GoldRows:
    """Cut a teacher's rows at the beginnings of spans for ``gold``.

    Column 0 becomes the span, whatever tokens either side writes it with. A student token that is the span's first, and
    is matched to another entry, stands for the span alone: that entry joins the rest, as on the student's side what the
    token has beyond the span does.

    Args:
        rows: top-k or top-p rows over the teacher's vocabulary, column 0 the realised token.
        matching: pairs of tokens.
        realised_N: int64 the student's first token of each span; -1 where there is none, and nothing stands for it.
        continuation_logp_N: [N] log-prob of the span's further teacher tokens, given its first, at the temperature of
            the rows; 0 where there are none. Default all.

    Raises:
        ConfigError: sampled rows.
    """
    _require_order_statistics(rows, "gold")
    merged = rows if continuation_logp_N is None else merge_realised(rows, continuation_logp_N)
    ids_NK = class_of(rows.ids_NK, matching.student_of_teacher_U)
    others_NK = ids_NK[:, 1:].masked_fill(ids_NK[:, 1:] == realised_N[:, None], -1)
    matched_NK = torch.cat([realised_N[:, None], others_NK], -1)
    log_masses_NK = merged.log_masses_NK
    assert merged.log_rest_N is not None, "not sampled"
    lost_N = log_masses_NK.masked_fill(matched_NK >= 0, -math.inf).logsumexp(-1)
    matched = TeacherRows(
        matched_NK, log_masses_NK.masked_fill(matched_NK < 0, -math.inf), torch.logaddexp(merged.log_rest_N, lost_N)
    )
    unmatched_NK = rows.log_masses_NK.masked_fill((ids_NK >= 0) | (rows.ids_NK < 0), -math.inf)
    unmatched_NK[:, 0] = -math.inf
    assert rows.log_rest_N is not None, "not sampled"
    ceiling_N = torch.minimum(_least(rows.log_masses_NK[:, 1:]), rows.log_rest_N)
    num_entries_N = (rows.ids_NK >= 0).sum(-1)
    return GoldRows(matched, unmatched_NK.sort(dim=-1, descending=True).values, ceiling_N, num_entries_N)


def merge_realised(rows: TeacherRows, continuation_logp_N: Tensor) -> TeacherRows:
    """Make column 0 the event that the realised first token comes *and* is followed by the rest of its span.

    Its mass is multiplied with the probabilities of the further tokens, each given what stands before it, and the mass
    that this takes away goes to the rest.

    Args:
        rows: exact rows, column 0 the realised token.
        continuation_logp_N: [N] nats, at the temperature of the rows; 0 for spans of one token.

    Raises:
        ConfigError: sampled rows, which have no rest to put it in.
    """
    if rows.log_rest_N is None:
        raise ConfigError("spans of several tokens cannot be merged in sampled rows, which have no rest")
    first_N, left_N = _split(rows.log_masses_NK[:, 0], continuation_logp_N)
    log_masses_NK = torch.cat([first_N[:, None], rows.log_masses_NK[:, 1:]], -1)
    return TeacherRows(rows.ids_NK, log_masses_NK, _add(rows.log_rest_N, left_N))


def merge_realised_outputs(student: HeadOutputs, continuation_logp_N: Tensor) -> HeadOutputs:
    """The same of the student: column 0 of ``gathered_TK`` is the realised first token. Gradients flow through both."""
    first_N, left_N = _split(student.gathered_TK[:, 0], continuation_logp_N)
    gathered_TK = torch.cat([first_N[:, None], student.gathered_TK[:, 1:]], -1)
    return student._replace(gathered_TK=gathered_TK, complement_T=_add(student.complement_T, left_N))


def gold(
    rows: GoldRows,
    student: HeadOutputs,
    continuation_logp_N: Tensor | None = None,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    matched_weight: float = 1.0,
    unmatched_weight: float = 1.0,
) -> Tensor:
    """A divergence on the matched tokens, and a sorted L1 distance on the others, [N] (TRL's GOLD trainer, 2025).

    The first part is on the partition {span, matched entries, everything else}, so it is a divergence: >= 0, and 0
    exactly when the two agree on every cell. TRL's and NeMo-RL's is the sum over the matched slice alone, whose masses
    do not sum to one, and which is negative where the student has more of it. It is exact for listed entries, and a
    lower bound against the teacher's whole distribution. At temperature T it is multiplied by T^2.

    The second part, a number in 0..2, compares the teacher's unmatched entries with the student's unmatched tokens by
    rank. From where the teacher's end, its masses are only known to be at most those that are listed, and what the
    student's exceed this by is charged. That is a lower bound, off by at most both sides' unmatched unlisted mass.

    Args:
        rows: of ``gold_rows``.
        student: of ``rows.matched.ids_NK``, with ``num_top`` M >= K and ``top_among_V=matching.unmatched_V``.
        continuation_logp_N: [N] the student's log-prob of the span's further tokens given its first; default all 0.
        beta: of the generalised JSD (Agarwal et al. 2024, GKD): 0 is forward KL, towards 1 it tends to reverse KL.
        temperature: of the rows and the student.
        matched_weight: of the first part.
        unmatched_weight: of the second. TRL weighs the two by the share of the teacher's vocabulary that is matched.

    Raises:
        ConfigError: beta is not in [0, 1).
    """
    if continuation_logp_N is not None:
        student = merge_realised_outputs(student, continuation_logp_N)
    matched_N = temperature**2 * generalised_jsd(rows.matched, student, beta)
    return matched_weight * matched_N + unmatched_weight * unmatched_distance(rows, student)


def generalised_jsd(rows: TeacherRows, student: HeadOutputs, beta: float) -> Tensor:
    """beta KL(p, m) + (1 - beta) KL(q, m) with m = beta p + (1 - beta) q, on {listed, rest}, [N] nats.

    KL(p, q) at beta 0.

    Raises:
        ConfigError: beta is not in [0, 1).
    """
    if not 0.0 <= beta < 1.0:
        raise ConfigError(f"beta is {beta:g}, expected a number in [0, 1): 0 is forward KL")
    assert rows.log_rest_N is not None, "not sampled"
    if beta == 0.0:
        return forward_kl_partition(rows.log_masses_NK, rows.log_rest_N, student)
    log_p_NC = torch.cat([rows.log_masses_NK, rows.log_rest_N[:, None]], -1).clamp(min=NO_MASS)
    log_q_NC = torch.cat([student.gathered_TK, student.complement_T[:, None]], -1) - student.logsumexp_T[:, None]
    log_q_NC = log_q_NC.clamp(min=NO_MASS)
    log_mixed_NC = torch.logaddexp(log_p_NC + math.log(beta), log_q_NC + math.log1p(-beta))
    from_p_NC, from_q_NC = (cell_divergence(log_mass_NC, log_mixed_NC) for log_mass_NC in (log_p_NC, log_q_NC))
    return (beta * from_p_NC + (1.0 - beta) * from_q_NC).sum(-1)


def unmatched_distance(rows: GoldRows, student: HeadOutputs) -> Tensor:
    """The second part of ``gold``: sorted L1 of the entries without a pair, [N]."""
    num_entries = rows.unmatched_NK.shape[1]
    q_NM = _top_probabilities(student, num_entries)
    known_NM = torch.nn.functional.pad(rows.unmatched_NK, (0, q_NM.shape[1] - num_entries), value=-math.inf)
    is_rank_NM = torch.arange(q_NM.shape[1], device=q_NM.device) < rows.num_entries_N[:, None]
    above_NM = (q_NM - rows.ceiling_N.exp()[:, None]).clamp(min=0.0) * is_rank_NM
    return torch.where(known_NM > -math.inf, (known_NM.exp() - q_NM).abs(), above_NM).sum(-1)


def _top_probabilities(student: HeadOutputs, num_entries: int) -> Tensor:
    if student.top_TM is None or student.top_TM.shape[1] < num_entries:
        found = "none" if student.top_TM is None else student.top_TM.shape[1]
        raise ValueError(f"the student's largest logits are needed: found {found}, expected at least {num_entries}")
    return torch.exp(student.top_TM - student.logsumexp_T[:, None])


def _require_order_statistics(rows: TeacherRows, objective: str) -> None:
    if rows.is_sample:
        raise ConfigError(
            f"{objective} pairs tokens by rank, which sampled entries do not have: produce with a selection that "
            "samples nothing, such as topk:64, or train on chunk_likelihood or projected_kl"
        )


def _least(log_masses_NK: Tensor) -> Tensor:
    """[N] the least mass that is listed, inf if none is."""
    listed_NK = log_masses_NK.masked_fill(log_masses_NK == -math.inf, math.inf)
    return torch.nn.functional.pad(listed_NK, (0, 1), value=math.inf).amin(-1)


def _split(log_mass_N: Tensor, continuation_logp_N: Tensor) -> tuple[Tensor, Tensor]:
    """A mass times a probability, and what is left of it; nothing is left where the probability is 1."""
    is_whole_N = continuation_logp_N >= 0.0
    left_N = log_mass_N + log1mexp(continuation_logp_N.masked_fill(is_whole_N, -1.0))
    whole_N = continuation_logp_N.clamp(max=0.0)
    return log_mass_N + whole_N, left_N.masked_fill(is_whole_N, -math.inf)


def _add(log_a: Tensor, log_b: Tensor) -> Tensor:
    """logaddexp, whose gradient at two times -inf is 0 here and not nan."""
    none = (log_a == -math.inf) & (log_b == -math.inf)
    return torch.logaddexp(log_a.masked_fill(none, 0.0), log_b.masked_fill(none, 0.0)).masked_fill(none, -math.inf)
