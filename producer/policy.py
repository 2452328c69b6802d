"""What every selection policy is: places kept for certain, and draws from the rest.

A policy sees rows of distributions and says which entries stay. Whatever any part of it keeps for certain is there with
probability 1 and weighs p; so are the realised token and the argmax, always. What it draws besides stands for the
others: n draws of an entry weigh ``n * draw_weight``, which is p in expectation, so that sums over a row are unbiased
for sums over the vocabulary.

A place is one integer, ``row * V + id``. Shapes: R rows, V vocabulary, E entries, C places kept for certain, S drawn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

FIXED_POINT_BITS = 40
FIXED_POINT = 1 << FIXED_POINT_BITS
"""Probabilities are summed as whole multiples of 2^-40: integer sums do not depend on how they are split."""
GROUP = 32
"""Running sums are taken within the groups of this many tokens where a draw falls, and over the sums of groups: a
running sum over the whole vocabulary would cost more than all the rest of a selection."""


class Rows(NamedTuple):
    """Distributions, and what decides about their entries.

    Attributes:
        logits_RV: native dtype; ranks are decided on these, ties by the smaller id.
        probs_RV: float32.
        argmax_R: int64, the most likely token, the smallest id among equals.
        realised_R: int64, the token that the text goes on with.
        words_R: int64, uniform random bits of each row.
        given_RK: int64, ids supplied from outside, -1 for none; None unless the policy asks for them.
    """

    logits_RV: Tensor
    probs_RV: Tensor
    argmax_R: Tensor
    realised_R: Tensor
    words_R: Tensor
    given_RK: Tensor | None = None


def rows_of(logits_RV: Tensor, realised_R: Tensor, given_RK: Tensor | None = None) -> Rows:
    """The distributions of a chunk, without random words."""
    probs_RV = torch.softmax(logits_RV, dim=-1, dtype=torch.float32)
    argmax_R = logits_RV.max(-1)[1]  # torch promises the first of equal maxima
    return Rows(logits_RV, probs_RV, argmax_R, realised_R, torch.zeros_like(realised_R), given_RK)


class Entries(NamedTuple):
    """The entries kept, each once, in no order: int64 row, token id, and draws that hit it, 0 if certain; [E] each."""

    row_E: Tensor
    id_E: Tensor
    draws_E: Tensor


class Policy(ABC):
    """One way to choose entries; deterministic given its recipe and the rows."""

    @property
    def seed(self) -> int:
        """Of its random numbers, if it draws."""
        return 0

    @property
    def draw_weight(self) -> float | None:
        """Weight of one draw of a sampled entry, None when the policy samples nothing."""
        return None

    @property
    @abstractmethod
    def max_entries(self) -> int:
        """Entries that a row can have at most, next to the realised token and the argmax."""

    @abstractmethod
    def to_json(self) -> dict[str, object]:
        """What goes into the recipe."""

    @abstractmethod
    def keep(self, rows: Rows) -> Tensor:
        """int64 places kept for certain, in no order, possibly repeated."""

    def draw(self, rows: Rows, place_C: Tensor) -> tuple[Tensor, Tensor]:
        """Places drawn, each once, and how many draws hit each; none of the sorted ``place_C``, which are certain."""
        nothing = place_C[:0]
        return nothing, nothing

    def select(self, rows: Rows) -> Entries:
        """The entries of some rows."""
        num_tokens = rows.logits_RV.shape[-1]
        always = places(torch.stack([rows.realised_R, rows.argmax_R], dim=-1), num_tokens).reshape(-1)
        place_C = torch.cat([self.keep(rows), always]).unique(sorted=True)
        place_S, draws_S = self.draw(rows, place_C)
        place_E = torch.cat([place_C, place_S])
        draws_E = torch.cat([torch.zeros_like(place_C), draws_S])
        row_E = place_E.div(num_tokens, rounding_mode="floor")
        return Entries(row_E, place_E - row_E * num_tokens, draws_E)


def places(ids_RK: Tensor, num_tokens: int) -> Tensor:
    """int64 [R, K] places of ids that stand one row below the other."""
    return ids_RK + num_tokens * torch.arange(len(ids_RK), device=ids_RK.device)[:, None]


def in_groups(probs_RV: Tensor, scale: float) -> Tensor:
    """int64 [R, G, GROUP]: ``scale * probs`` in whole numbers, the last group filled up with zeros."""
    num_rows, num_tokens = probs_RV.shape
    num_groups = -(-num_tokens // GROUP)
    fixed_RV = probs_RV.new_empty(num_rows, num_groups * GROUP, dtype=torch.int64)
    fixed_RV[:, :num_tokens] = probs_RV * scale
    fixed_RV[:, num_tokens:] = 0
    return fixed_RV.view(num_rows, num_groups, GROUP)
