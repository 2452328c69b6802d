"""Selection policies: which entries of a distribution are kept.

``topk:K`` keeps the K most likely tokens. ``threshold:THETA`` keeps for certain whatever has p >= theta, and samples
the rest systematically: in id order, each with inclusion probability p / theta, steered by one uniform number per row.
A sampled entry then stands for weight theta, a certain one for p, so that sums over the row are unbiased for sums over
the vocabulary, and the weights of a row add up to 1 within theta. ``threshold:N`` (N >= 1) asks for the theta that
keeps N entries a row on average.

Every policy keeps the realised token and the argmax for certain. Shapes: R rows, V vocabulary, E entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from logitstore.codecs.sparse_rows import MAX_ROW_ENTRIES
from logitstore.digests import decimal
from logitstore.errors import ConfigError

# Inclusion probabilities are summed as whole multiples of 2^-40: integer sums do not depend on how they are split.
_FIXED_POINT_BITS = 40
_FIXED_POINT = 1 << _FIXED_POINT_BITS
# Running sums are taken within the groups of this many tokens where a draw falls, and over the sums of groups: a
# running sum over the whole vocabulary would cost more than all the rest of a selection.
_GROUP = 32


MAX_K = MAX_ROW_ENTRIES - 1
"""The realised token is kept besides."""
MIN_THETA = 2e-5
"""A row has at most 1 / theta + 3 entries: what is likely, what is drawn, the realised token and the argmax."""


class Rows(NamedTuple):
    """Distributions, and what decides about their entries.

    Attributes:
        logits_RV: native dtype; ranks are decided on these, ties by the smaller id.
        probs_RV: float32.
        argmax_R: int64, the most likely token, the smallest id among equals.
        realised_R: int64, the token that the text goes on with.
        words_R: int64, uniform random bits of each row.
    """

    logits_RV: Tensor
    probs_RV: Tensor
    argmax_R: Tensor
    realised_R: Tensor
    words_R: Tensor


class Entries(NamedTuple):
    """The entries kept, each once, in no order: int64 row, token id, and draws that hit it, 0 if certain; [E] each."""

    row_E: Tensor
    id_E: Tensor
    draws_E: Tensor


class Policy(Protocol):
    @property
    def draw_weight(self) -> float | None:
        """Weight of one draw of a sampled entry, None when the policy samples nothing."""

    def to_json(self) -> dict[str, str]:
        """What goes into the recipe."""

    def select(self, rows: Rows) -> Entries:
        """Choose entries."""


@dataclass(frozen=True)
class TopK:
    k: int

    @property
    def draw_weight(self) -> None:
        return None

    def to_json(self) -> dict[str, str]:
        return {"policy": "topk", "k": str(self.k)}

    def select(self, rows: Rows) -> Entries:
        ids_RK = _first_topk(rows.logits_RV, min(self.k, rows.logits_RV.shape[-1]))
        row_RK = torch.arange(len(ids_RK), device=ids_RK.device)[:, None].expand_as(ids_RK)
        row_M = (ids_RK != rows.realised_R[:, None]).all(-1).nonzero()[:, 0]
        row_E = torch.cat([row_RK.reshape(-1), row_M])
        id_E = torch.cat([ids_RK.reshape(-1), rows.realised_R[row_M]])
        return Entries(row_E, id_E, torch.zeros_like(row_E))


@dataclass(frozen=True)
class Threshold:
    theta: float
    seed: int = 0

    @property
    def draw_weight(self) -> float:
        return self.theta

    def to_json(self) -> dict[str, str]:
        return {"policy": "threshold", "theta": decimal(self.theta), "seed": str(self.seed)}

    def select(self, rows: Rows) -> Entries:
        certain_RV = rows.probs_RV >= self.theta
        certain_RV.scatter_(-1, torch.stack([rows.realised_R, rows.argmax_R], dim=-1), True)
        row_C, id_C = certain_RV.nonzero(as_tuple=True)
        row_S, id_S = self._draw(rows, row_C, id_C)
        draws_E = torch.cat([torch.zeros_like(row_C), torch.ones_like(row_S)])
        return Entries(torch.cat([row_C, row_S]), torch.cat([id_C, id_S]), draws_E)

    def _draw(self, rows: Rows, row_C: Tensor, id_C: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and ids drawn: where the running sum of chances, begun at a uniform offset, passes a whole number.

        Entries (``row_C``, ``id_C``) are not drawn.
        """
        num_rows, num_tokens = rows.probs_RV.shape
        num_groups = -(-num_tokens // _GROUP)
        chance_RV = rows.probs_RV.new_empty(num_rows, num_groups * _GROUP, dtype=torch.int64)
        chance_RV[:, :num_tokens] = rows.probs_RV * (_FIXED_POINT / self.theta)
        chance_RV[:, num_tokens:] = 0
        chance_RV[row_C, id_C] = 0
        chance_RGX = chance_RV.view(num_rows, num_groups, _GROUP)
        offset_R1 = (rows.words_R[:, None] >> 24) & (_FIXED_POINT - 1)
        sum_RG = chance_RGX.sum(-1)
        end_RG = sum_RG.cumsum(-1) + offset_R1
        begin_RG = end_RG - sum_RG
        row_H, group_H = _passes_whole(begin_RG, end_RG).nonzero(as_tuple=True)
        chance_HX = chance_RGX[row_H, group_H]
        end_HX = chance_HX.cumsum(-1) + begin_RG[row_H, group_H, None]
        hit_S, place_S = _passes_whole(end_HX - chance_HX, end_HX).nonzero(as_tuple=True)
        return row_H[hit_S], group_H[hit_S] * _GROUP + place_S


@dataclass(frozen=True)
class ThresholdBudget:
    """``threshold:N``: to be resolved to a theta once for the dataset, see ``calibration``."""

    entries: float
    seed: int = 0


def parse_selection(text: str, seed: int = 0) -> Policy | ThresholdBudget:
    """``topk:64``, ``threshold:0.01`` (theta) or ``threshold:12`` (mean entries a row); ``seed`` is that of the draws.

    Raises:
        ConfigError: anything else.
    """
    name, _, value = text.partition(":")
    try:
        if name == "topk" and 1 <= int(value) <= MAX_K:
            return TopK(int(value))
        if name == "threshold" and MIN_THETA <= float(value) < math.inf:
            number = float(value)
            return Threshold(number, seed) if number < 1 else ThresholdBudget(number, seed)
    except ValueError:
        pass
    raise ConfigError(
        f"--select {text!r}: expected topk:K (1 <= K <= {MAX_K}), threshold:N (N >= 1 entries on average) or "
        f"threshold:THETA ({MIN_THETA:g} <= THETA < 1)"
    )


def _first_topk(logits_RV: Tensor, k: int) -> Tensor:
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


def _passes_whole(begin: Tensor, end: Tensor) -> Tensor:
    """bool: whether a whole number lies in (begin, end], in fixed point."""
    return (end >> _FIXED_POINT_BITS) > (begin >> _FIXED_POINT_BITS)
