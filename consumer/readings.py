"""What else is read off a chunk's logits while they are there: single logits, the largest ones, sums over subsets.

A reading is taken before the cells are measured, which overwrites the logits; its gradient is added after theirs.

Shapes: T positions, R positions of one chunk (``rows``), V vocabulary, M largest logits, G subsets, K listed ids.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from logitstore.consumer.cells import MASS_FLOOR, NO_LOGIT, SplitSoftmax


class Reading(Protocol):
    """A function of the logits, for all T rows."""

    def read(self, rows: slice, logits_RV: Tensor) -> Tensor:
        """Its values [R, ...]; leaves the logits as they are."""

    def gradient(self, rows: slice, split: SplitSoftmax, values: Tensor, grads: Tensor, out: Tensor) -> None:
        """Add the gradient to the logits to ``out`` [R, V]."""


class OneLogit:
    """The logit at one entry of each row; -inf where the index is -1."""

    def __init__(self, index_T: Tensor) -> None:
        self.none_T1 = index_T[:, None] < 0
        self.index_T1 = index_T[:, None].clamp(min=0)

    def read(self, rows: slice, logits_RV: Tensor) -> Tensor:
        return logits_RV.gather(1, self.index_T1[rows]).masked_fill_(self.none_T1[rows], NO_LOGIT)[:, 0]

    def gradient(self, rows: slice, split: SplitSoftmax, values: Tensor, grads: Tensor, out: Tensor) -> None:
        out.scatter_add_(1, self.index_T1[rows], grads[:, None].masked_fill(self.none_T1[rows], 0.0))


class TopLogits:
    """The M largest logits of each row, in descending order; of equal ones, those of the lowest ids.

    Order statistics have a gradient: each is the logit of one entry, almost everywhere.

    Args:
        num_top: M; -inf stands where a row has fewer entries to choose from.
        listed_TK: int64 entries that are left out, -1 for fill; None for none.
        among_V: bool, the entries to choose from; None for all.
    """

    def __init__(
        self, num_rows: int, num_top: int, listed_TK: Tensor | None, among_V: Tensor | None, device: torch.device
    ) -> None:
        self.num_top, self.listed_TK, self.among_V = num_top, listed_TK, among_V
        self.ids_TM = torch.zeros((num_rows, num_top), dtype=torch.int64, device=device)

    def read(self, rows: slice, logits_RV: Tensor) -> Tensor:
        candidates_RV = self._candidates(rows, logits_RV)
        ids_RM = _top_ids(candidates_RV, min(self.num_top, candidates_RV.shape[1]))
        self.ids_TM[rows, : ids_RM.shape[1]] = ids_RM
        missing = self.num_top - ids_RM.shape[1]
        return torch.nn.functional.pad(candidates_RV.gather(1, ids_RM), (0, missing), value=NO_LOGIT)

    def _candidates(self, rows: slice, logits_RV: Tensor) -> Tensor:
        if self.among_V is not None:
            logits_RV = logits_RV.masked_fill(~self.among_V, NO_LOGIT)
        if self.listed_TK is not None:
            listed_RK = self.listed_TK[rows]
            # Adding leaves the entry alone that fill is clamped to.
            minus_inf_RK = torch.zeros_like(listed_RK, dtype=logits_RV.dtype).masked_fill_(listed_RK >= 0, NO_LOGIT)
            logits_RV = logits_RV.scatter_add(1, listed_RK.clamp(min=0), minus_inf_RK)
        return logits_RV

    def gradient(self, rows: slice, split: SplitSoftmax, values: Tensor, grads: Tensor, out: Tensor) -> None:
        out.scatter_add_(1, self.ids_TM[rows], grads.masked_fill(values == NO_LOGIT, 0.0))


def _top_ids(logits_RV: Tensor, num_top: int) -> Tensor:
    """[R, M] ids of the largest logits, by (logit descending, id ascending)."""
    top_RM, ids_RM = logits_RV.topk(num_top, -1)
    least_R1 = top_RM[:, -1:]
    # topk takes any of the entries that tie for the last places, and bf16 logits often do.
    tied = ((logits_RV == least_R1).sum(-1) > (top_RM == least_R1).sum(-1)).nonzero()[:, 0]
    if len(tied):
        tied_RV, least_R1 = logits_RV[tied], least_R1[tied]
        room_R1 = (top_RM[tied] == least_R1).sum(-1, keepdim=True)
        is_least_RV = tied_RV == least_R1
        chosen_RV = (tied_RV > least_R1) | (is_least_RV & (is_least_RV.cumsum(-1, dtype=torch.int32) <= room_R1))
        ids_RM[tied] = chosen_RV.nonzero()[:, 1].view(-1, num_top)
    ids_RM = ids_RM.sort(-1).values
    return ids_RM.gather(1, logits_RV.gather(1, ids_RM).sort(dim=-1, descending=True, stable=True).indices)


class SubsetSums:
    """logsumexp over each of a few fixed subsets of the vocabulary.

    Sums of float32 probabilities, so floored at ``MASS_FLOOR`` of the largest logit, as classes are.

    Args:
        subsets_GV: bool.
    """

    def __init__(self, subsets_GV: Tensor) -> None:
        self.subsets_GV = subsets_GV
        self.empty_G = ~subsets_GV.any(-1)

    def read(self, rows: slice, logits_RV: Tensor) -> Tensor:
        top_R1 = logits_RV.amax(-1, keepdim=True)
        mass_RG = (logits_RV - top_R1).exp_() @ self.subsets_GV.T.to(logits_RV.dtype)
        return mass_RG.clamp_(min=MASS_FLOOR).log_().add_(top_R1).masked_fill_(self.empty_G, NO_LOGIT)

    def gradient(self, rows: slice, split: SplitSoftmax, values: Tensor, grads: Tensor, out: Tensor) -> None:
        """Of logit v: softmax(v) within the subset, for each subset that it is in."""
        totals_RG = values.masked_fill(self.empty_G, 0.0)
        factor_RG = torch.exp(split.log_norm_R[:, None] - totals_RG).mul_(grads).masked_fill_(self.empty_G, 0.0)
        out.addcmul_(split.softmax_RV, factor_RG @ self.subsets_GV.to(out.dtype))
        if split.beside_ids_RK is None or split.beside_logits_RK is None:
            return
        for subset_V, total_R, grad_R in zip(self.subsets_GV, totals_RG.T, grads.T, strict=True):
            inside_RK = split.beside_logits_RK.masked_fill(~subset_V[split.beside_ids_RK], NO_LOGIT)
            out.scatter_add_(1, split.beside_ids_RK, torch.exp(inside_RK - total_R[:, None]) * grad_R[:, None])
