"""``topk:K`` and ``topp:P,max=K``: the most likely tokens, for certain. Rows are exact, with the mass outside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from logitstore.digests import decimal
from logitstore.producer.policy import FIXED_POINT, Policy, Rows, places


@dataclass(frozen=True)
class TopK(Policy):
    """The K most likely tokens, the smaller ids among equals."""

    k: int

    @property
    def max_entries(self) -> int:
        return self.k

    def to_json(self) -> dict[str, object]:
        return {"policy": "topk", "k": str(self.k)}

    def keep(self, rows: Rows) -> Tensor:
        num_tokens = rows.logits_RV.shape[-1]
        return places(first_topk(rows.logits_RV, min(self.k, num_tokens)), num_tokens).reshape(-1)


@dataclass(frozen=True)
class TopP(Policy):
    """The smallest set of most likely tokens whose mass reaches P, but at most ``max_k``; ties by id."""

    p: float
    max_k: int

    @property
    def max_entries(self) -> int:
        return self.max_k

    def to_json(self) -> dict[str, object]:
        return {"policy": "topp", "p": decimal(self.p), "max": str(self.max_k)}

    def keep(self, rows: Rows) -> Tensor:
        num_tokens = rows.logits_RV.shape[-1]
        ids_RK = first_topk(rows.logits_RV, min(self.max_k, num_tokens)).sort(-1).values
        order_RK = rows.logits_RV.gather(-1, ids_RK).sort(dim=-1, descending=True, stable=True).indices
        ids_RK = ids_RK.gather(-1, order_RK)
        mass_RK = (rows.probs_RV.gather(-1, ids_RK) * FIXED_POINT).long()
        before_RK = mass_RK.cumsum(-1) - mass_RK
        return places(ids_RK, num_tokens)[before_RK < int(self.p * FIXED_POINT)]


def first_topk(logits_RV: Tensor, k: int) -> Tensor:
    """int64 [R, k], in no order: ids of the largest logits, the smaller ids among equals."""
    values_RK, ids_RK = torch.topk(logits_RV, k, dim=-1, sorted=False)
    smallest_R1 = values_RK.amin(-1, keepdim=True)
    # Half-precision logits tie often. Where that leaves a choice, torch's is not ours.
    crowded_R = (logits_RV >= smallest_R1).sum(-1, dtype=torch.int32) > k
    if crowded_R.any():
        logits_CV, smallest_C1 = logits_RV[crowded_R], smallest_R1[crowded_R]
        above_CV, tied_CV = logits_CV > smallest_C1, logits_CV == smallest_C1
        room_C1 = k - above_CV.sum(-1, keepdim=True, dtype=torch.int32)
        kept_CV = above_CV | (tied_CV & (tied_CV.cumsum(-1, dtype=torch.int32) <= room_C1))
        ids_RK[crowded_R] = kept_CV.nonzero()[:, 1].view(-1, k)
    return ids_RK
