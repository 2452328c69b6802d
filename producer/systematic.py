"""``threshold:THETA``: whatever has p >= theta for certain, the rest by systematic sampling in proportion to p.

In id order, each other token is drawn with inclusion probability p / theta, steered by one uniform number per row
(Madow 1949), and weighs theta. So the weights of a row add up to 1 within theta, and neighbours in the vocabulary are
rarely drawn together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from logitstore.digests import decimal
from logitstore.producer.policy import FIXED_POINT, FIXED_POINT_BITS, GROUP, Policy, Rows, in_groups

MIN_THETA = 2e-5
"""A row has at most 1 / theta + 3 entries: what is likely, what is drawn, the realised token and the argmax."""


@dataclass(frozen=True)
class Threshold(Policy):
    """Systematic PPS sampling below ``theta``, which is the same for all rows."""

    theta: float
    seed: int = 0

    @property
    def draw_weight(self) -> float:
        return self.theta

    @property
    def max_entries(self) -> int:
        return int(1 / self.theta) + 1

    def to_json(self) -> dict[str, object]:
        return {"policy": "threshold", "theta": decimal(self.theta), "seed": str(self.seed)}

    def keep(self, rows: Rows) -> Tensor:
        return (rows.probs_RV >= self.theta).reshape(-1).nonzero()[:, 0]

    def draw(self, rows: Rows, place_C: Tensor) -> tuple[Tensor, Tensor]:
        """Where the running sum of chances, begun at a uniform offset, passes a whole number."""
        num_tokens = rows.probs_RV.shape[1]
        chance_RGX = in_groups(rows.probs_RV, FIXED_POINT / self.theta)
        row_C = place_C.div(num_tokens, rounding_mode="floor")
        chance_RGX.view(len(chance_RGX), -1)[row_C, place_C - row_C * num_tokens] = 0
        offset_R1 = (rows.words_R[:, None] >> 24) & (FIXED_POINT - 1)
        sum_RG = chance_RGX.sum(-1)
        end_RG = sum_RG.cumsum(-1) + offset_R1
        begin_RG = end_RG - sum_RG
        row_H, group_H = _passes_whole(begin_RG, end_RG).nonzero(as_tuple=True)
        chance_HX = chance_RGX[row_H, group_H]
        end_HX = chance_HX.cumsum(-1) + begin_RG[row_H, group_H, None]
        hit_S, within_S = _passes_whole(end_HX - chance_HX, end_HX).nonzero(as_tuple=True)
        place_S = row_H[hit_S] * num_tokens + group_H[hit_S] * GROUP + within_S
        return place_S, torch.ones_like(place_S)


def _passes_whole(begin: Tensor, end: Tensor) -> Tensor:
    """bool: whether a whole number lies in (begin, end], in fixed point."""
    return (end >> FIXED_POINT_BITS) > (begin >> FIXED_POINT_BITS)
