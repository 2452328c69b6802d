"""Selection policies: which entries of a distribution are kept.

``topk:K`` keeps the K most likely tokens. ``threshold:THETA`` keeps for certain whatever has p >= theta, and samples
the rest systematically: in id order, each with inclusion probability p / theta, steered by one uniform number per row.
A sampled entry then stands for weight theta, a certain one for p, so that sums over the row are unbiased for sums over
the vocabulary, and the weights of a row add up to 1 within theta. ``threshold:N`` (N >= 1) asks for the theta that
keeps N entries a row on average.

Every policy keeps the realised token and the argmax for certain. Shapes: R rows, V vocabulary, E entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from logitstore.digests import decimal
from logitstore.errors import ConfigError

# Inclusion probabilities are summed as whole multiples of 2^-40: integer sums do not depend on how they are split.
_FIXED_POINT = 1 << 40


class Kept(NamedTuple):
    """Which entries are kept: bool [R, V] each; ``sampled`` marks those of ``kept`` that a draw decided."""

    kept_RV: Tensor
    sampled_RV: Tensor


class Policy(Protocol):
    @property
    def theta(self) -> float | None:
        """Weight of a sampled entry, None when the policy samples nothing."""

    def to_json(self) -> dict[str, str]:
        """What goes into the recipe."""

    def select(self, logits_RV: Tensor, logprobs_RV: Tensor, realised_R: Tensor, words_R: Tensor) -> Kept:
        """Choose entries.

        Args:
            logits_RV: native dtype; ranks are decided on these, ties by the smaller id.
            logprobs_RV: float32, nats.
            realised_R: int64, the token that the text goes on with.
            words_R: int64, uniform random bits of each row.
        """


@dataclass(frozen=True)
class TopK:
    k: int

    @property
    def theta(self) -> None:
        return None

    def to_json(self) -> dict[str, str]:
        return {"policy": "topk", "k": str(self.k)}

    def select(self, logits_RV: Tensor, logprobs_RV: Tensor, realised_R: Tensor, words_R: Tensor) -> Kept:
        k = min(self.k, logits_RV.shape[-1])
        smallest_R1 = torch.topk(logits_RV, k, dim=-1).values[:, -1:]
        kept_RV = logits_RV >= smallest_R1
        # Half-precision logits tie often. Where that keeps more than k, the larger ids among the tied ones go.
        crowded_R = kept_RV.sum(-1) > k
        if crowded_R.any():
            above, tied = logits_RV[crowded_R] > smallest_R1[crowded_R], logits_RV[crowded_R] == smallest_R1[crowded_R]
            room = k - above.sum(-1, keepdim=True)
            kept_RV[crowded_R] = above | (tied & (tied.cumsum(-1) <= room))
        kept_RV.scatter_(-1, realised_R[:, None], True)
        return Kept(kept_RV, torch.zeros_like(kept_RV))


@dataclass(frozen=True)
class Threshold:
    theta: float
    seed: int = 0

    def to_json(self) -> dict[str, str]:
        return {"policy": "threshold", "theta": decimal(self.theta), "seed": str(self.seed)}

    def select(self, logits_RV: Tensor, logprobs_RV: Tensor, realised_R: Tensor, words_R: Tensor) -> Kept:
        probs_RV = logprobs_RV.exp()
        certain_RV = probs_RV >= self.theta
        certain_RV.scatter_(-1, torch.stack([realised_R, first_argmax(logits_RV)], dim=-1), True)
        chance_RV = (probs_RV * (_FIXED_POINT / self.theta)).to(torch.int64).masked_fill_(certain_RV, 0)
        # One uniform offset a row; an entry is drawn when the running sum of chances passes a whole number on it.
        offset_R1 = (words_R[:, None] >> 24) & (_FIXED_POINT - 1)
        turns_RV = (chance_RV.cumsum(-1) + offset_R1) // _FIXED_POINT
        before_RV = torch.cat([torch.zeros_like(turns_RV[:, :1]), turns_RV[:, :-1]], dim=-1)
        sampled_RV = turns_RV > before_RV
        return Kept(certain_RV | sampled_RV, sampled_RV)


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
        if name == "topk" and int(value) >= 1:
            return TopK(int(value))
        if name == "threshold" and float(value) > 0:
            number = float(value)
            return Threshold(number, seed) if number < 1 else ThresholdBudget(number, seed)
    except ValueError:
        pass
    raise ConfigError(
        f"--select {text!r}: expected topk:K (K >= 1), threshold:N (N >= 1 entries on average) or threshold:THETA "
        "(0 < THETA < 1)"
    )


def first_argmax(logits_RV: Tensor) -> Tensor:
    """int64 [R]: the most likely token, the smallest id among equals (torch.argmax promises none)."""
    is_max_RV = logits_RV == logits_RV.amax(-1, keepdim=True)
    return is_max_RV.to(torch.uint8).cumsum(-1, dtype=torch.int32).eq(0).sum(-1)
