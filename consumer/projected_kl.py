"""``projected_kl``: a teacher's rows and a student's head on one partition of both vocabularies.

At a shared beginning both models predict what the text goes on with, out of different tokens. The classes of
``logitstore.vocabulary_classes`` are a partition of either vocabulary, so both distributions are pushed forward to the
same cells: the teacher's there mixed with what ``open_tokens`` knows of longer tokens, and, inside a teacher's token,
from that alone.

One class is cut further. Where the teacher writes the realised token s with several, they have by the chain rule the
product P* of their probabilities. With m, what the row has of longer tokens of the same class that the student begins
with s, the cells are

    {s}, with P* + m;   class(s) without s, with the rest of its mass w;   every other class.

The first of the several lies in class(s) and is kept for certain in every row, so w is no less, whatever was sampled.
Weights enter linearly, so at shared beginnings without an open token the cross-entropy on these cells is unbiased where
w is (``threshold``, ``sample``); under ``topk`` it is a KL on {listed cells, rest}, a lower bound.

All other classes stay whole, and the text says which of its class the realised token is: -log q(s | class) is charged
beside, next to nothing where a class has one token. Either way a token is charged with all that is known of it, once.
Where the tokenizers disagree on the class of what comes next, the row speaks of another event, and the token is left to
the text altogether.

Shapes: N positions, K listed classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from logitstore.consumer.primitive import HeadOutputs
from logitstore.consumer.rows import TeacherRows

_SMALLEST_SHARE = 1e-6
"""What is left of a class besides the realised token counts as nothing below this share: log-probs have rounding."""


def split_realised(
    rows: TeacherRows, student: HeadOutputs, is_realised_NK: Tensor, log_realised_N: Tensor
) -> tuple[TeacherRows, HeadOutputs]:
    """Cut the realised token out of its class, on both sides, as a cell K + 1.

    A class that has no other token of the student cannot earn the teacher's w - P*: that mass goes to the rest, or out
    of a sample.

    Args:
        rows: over classes.
        student: ``head_outputs`` at ``rows.ids_NK`` with ``realised_cell``.
        is_realised_NK: bool, the realised token's class; at most one a row.
        log_realised_N: log P*, nats, in the measure of ``rows``; NaN where the class is to stay whole.

    Returns:
        Rows and outputs with K + 1 cells. Where the class stays whole, the last one is fill.
    """
    assert student.realised_T is not None, "asked for with realised_T"
    is_cut_N = log_realised_N.isfinite() & is_realised_NK.any(-1)
    cut_NK = is_realised_NK & is_cut_N[:, None]
    log_class_N = rows.log_masses_NK.masked_fill(~is_realised_NK, -torch.inf).amax(-1)
    log_realised_N = torch.minimum(log_realised_N.masked_fill(~is_cut_N, -torch.inf), log_class_N)
    log_left_N = _log_difference(log_class_N, log_realised_N)
    others_N = student.gathered_TK.gather(1, is_realised_NK.int().argmax(-1, keepdim=True))[:, 0]
    stranded_N = is_cut_N & (others_N == -torch.inf)
    log_rest_N = rows.log_rest_N
    if log_rest_N is not None:
        log_rest_N = torch.where(stranded_N, torch.logaddexp(log_rest_N, log_left_N), log_rest_N)
    log_left_N = log_left_N.masked_fill(stranded_N, -torch.inf)
    masses_NK = torch.where(cut_NK, log_left_N[:, None], rows.log_masses_NK)
    whole_N = torch.logaddexp(others_N, student.realised_T)
    gathered_NK = torch.where(is_realised_NK & ~cut_NK, whole_N[:, None], student.gathered_TK)
    fill_N1 = rows.ids_NK.new_full((len(rows.ids_NK), 1), -1)
    split = TeacherRows(
        torch.cat([rows.ids_NK, fill_N1], -1), torch.cat([masses_NK, log_realised_N[:, None]], -1), log_rest_N
    )
    realised_N = student.realised_T.masked_fill(~is_cut_N, -torch.inf)
    return split, student._replace(gathered_TK=torch.cat([gathered_NK, realised_N[:, None]], -1))


def within_class(student: HeadOutputs, is_realised_NK: Tensor) -> Tensor:
    """-log q(s | class of s), [N] nats, of ``head_outputs`` with ``realised_cell``; 0 where no class is marked."""
    assert student.realised_T is not None, "asked for with realised_T"
    others_N = student.gathered_TK.gather(1, is_realised_NK.int().argmax(-1, keepdim=True))[:, 0]
    nats_N = torch.logaddexp(others_N, student.realised_T) - student.realised_T
    return torch.where(is_realised_NK.any(-1), nats_N, 0.0)


def _log_difference(log_a: Tensor, log_b: Tensor) -> Tensor:
    """log(exp a - exp b) for a >= b; -inf where next to nothing is left."""
    share = -torch.expm1(log_b - log_a.masked_fill(log_a == -torch.inf, 0.0))
    return torch.where(share > _SMALLEST_SHARE, log_a + share.log(), -torch.inf)
