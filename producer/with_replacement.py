"""``sample:N``: N independent draws with replacement (RS-KD, ACL 2025). A token that n of them hit weighs n / N.

Each draw is a uniform number looked up in the running sum of the row's probabilities, in fixed point. Draws that hit
what is kept for certain are dropped: those weigh p, and the expected weight of every other token is p as before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from logitstore.producer.policy import FIXED_POINT, FIXED_POINT_BITS, GROUP, Policy, Rows, in_groups

_GOLDEN = 0x9E3779B97F4A7C15
_HALF_BITS = FIXED_POINT_BITS // 2


@dataclass(frozen=True)
class Sample(Policy):
    """Draws with replacement from the whole distribution."""

    num_draws: int
    seed: int = 0

    @property
    def draw_weight(self) -> float:
        return 1 / self.num_draws

    @property
    def max_entries(self) -> int:
        return self.num_draws

    def to_json(self) -> dict[str, object]:
        return {"policy": "sample", "n": str(self.num_draws), "seed": str(self.seed)}

    def keep(self, rows: Rows) -> Tensor:
        return rows.argmax_R[:0]

    def draw(self, rows: Rows, place_C: Tensor) -> tuple[Tensor, Tensor]:
        mass_RGX = in_groups(rows.probs_RV, FIXED_POINT)
        end_RG = mass_RGX.sum(-1).cumsum(-1)
        drawn_RN = _scaled(draw_words(rows.words_R, self.num_draws), end_RG[:, -1:])
        group_RN = torch.searchsorted(end_RG, drawn_RN, right=True)
        row_R1 = torch.arange(len(end_RG), device=end_RG.device)[:, None]
        end_RNX = mass_RGX[row_R1, group_RN].cumsum(-1)
        before_RN = end_RG.gather(-1, group_RN) - end_RNX[..., -1]
        within_RN = (end_RNX + before_RN[..., None] <= drawn_RN[..., None]).sum(-1)
        id_RN = group_RN * GROUP + within_RN
        place_S, draws_S = (row_R1 * rows.probs_RV.shape[1] + id_RN).unique(sorted=True, return_counts=True)
        found_S = torch.searchsorted(place_C, place_S).clamp(max=len(place_C) - 1)
        free_S = place_C[found_S] != place_S
        return place_S[free_S], draws_S[free_S]


def draw_words(words_R: Tensor, num_draws: int) -> Tensor:
    """int64 [R, N]: a row's word as the seed of a SplitMix64 stream (Steele, Lea, Flood 2014)."""
    steps_N = torch.arange(1, num_draws + 1, device=words_R.device) * _signed(_GOLDEN)
    words_RN = words_R[:, None] + steps_N
    words_RN = (words_RN ^ _shifted(words_RN, 30)) * _signed(0xBF58476D1CE4E5B9)
    words_RN = (words_RN ^ _shifted(words_RN, 27)) * _signed(0x94D049BB133111EB)
    return words_RN ^ _shifted(words_RN, 31)


def _scaled(words_RN: Tensor, total_R1: Tensor) -> Tensor:
    """Uniform words to whole numbers below ``total`` (about 2^40): floor(u * total / 2^40), in two halves that fit."""
    uniform_RN = _shifted(words_RN, 64 - FIXED_POINT_BITS)
    high_RN, low_RN = uniform_RN >> _HALF_BITS, uniform_RN & ((1 << _HALF_BITS) - 1)
    return (high_RN * total_R1 + ((low_RN * total_R1) >> _HALF_BITS)) >> _HALF_BITS


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shifted to the right without the sign, which torch has no unsigned integers for."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
