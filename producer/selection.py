"""``--select``: from its text to a policy. Parts joined by ``+`` make a union.

    topk:K             the K most likely tokens
    topp:P,max=K       the smallest set of most likely tokens with mass >= P, at most K
    sample:N           N draws with replacement (RS-KD)
    threshold:THETA    p >= theta for certain, the rest by systematic sampling; THETA < 1
    threshold:N        the same at the theta that keeps N entries a row on average; N >= 1
    given:URL          ids supplied from outside

Whatever a part of a union keeps for certain has inclusion probability 1, so that the others need not stand for it. One
part at most may sample: two estimates of one distribution would have to be weighed against each other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from logitstore.codecs.row_stream import MAX_ROW_ENTRIES
from logitstore.digests import canonical_json
from logitstore.errors import ConfigError
from logitstore.producer.given import Given, GivenIds
from logitstore.producer.likeliest import TopK, TopP
from logitstore.producer.policy import Policy, Rows
from logitstore.producer.systematic import MIN_THETA, Threshold
from logitstore.producer.with_replacement import Sample

MAX_K = MAX_ROW_ENTRIES - 1
"""The realised token is kept besides."""
MAX_SAMPLE = MAX_ROW_ENTRIES - 2
"""The realised token and the argmax are kept besides."""

_NEXT_PART = re.compile(r"\s*\+\s*(?=(?:topk|topp|sample|threshold|given):)")  # a URL may hold a plus
_TOPP = re.compile(r"([^,]+),\s*max=(\d+)")


@dataclass(frozen=True)
class Union(Policy):
    """Several policies at once, in the order of their recipes; one of them may sample."""

    members: tuple[Policy, ...]

    @property
    def seed(self) -> int:
        return 0 if self._sampler is None else self._sampler.seed

    @property
    def draw_weight(self) -> float | None:
        return None if self._sampler is None else self._sampler.draw_weight

    @property
    def max_entries(self) -> int:
        return sum(member.max_entries for member in self.members)

    def to_json(self) -> dict[str, object]:
        return {"policy": "union", "of": [member.to_json() for member in self.members]}

    def keep(self, rows: Rows) -> Tensor:
        return torch.cat([member.keep(rows) for member in self.members])

    def draw(self, rows: Rows, place_C: Tensor) -> tuple[Tensor, Tensor]:
        return super().draw(rows, place_C) if self._sampler is None else self._sampler.draw(rows, place_C)

    @property
    def _sampler(self) -> Policy | None:
        return next((member for member in self.members if member.draw_weight is not None), None)


@dataclass(frozen=True)
class ThresholdBudget:
    """``threshold:N``: to be resolved to a theta once for the dataset, see ``calibration``.

    Attributes:
        entries: N, of the threshold policy by itself.
        seed: of the draws.
        beside: the other parts of a union.
    """

    entries: float
    seed: int = 0
    beside: tuple[Policy, ...] = ()

    def resolve(self, theta: float) -> Policy:
        return _union([*self.beside, Threshold(theta, self.seed)])


def parse_selection(text: str, seed: int = 0) -> Policy | ThresholdBudget:
    """Read ``--select``; ``seed`` is that of the draws.

    Raises:
        ConfigError: no such policy, a number out of its range, two that sample, or rows that could become too long.
    """
    parts = [_parse_part(part.strip(), seed) for part in _NEXT_PART.split(text)]
    budgets = [part for part in parts if isinstance(part, ThresholdBudget)]
    policies = [part for part in parts if isinstance(part, Policy)]
    if len(budgets) + sum(policy.draw_weight is not None for policy in policies) > 1:
        raise ConfigError(f"--select {text!r}: two parts sample; keep one of sample:N and threshold:...")
    longest = sum(policy.max_entries for policy in policies)
    if longest > MAX_K:
        raise ConfigError(f"--select {text!r}: a row holds up to {MAX_K} entries, these could make {longest}")
    return ThresholdBudget(budgets[0].entries, seed, tuple(policies)) if budgets else _union(policies)


def parts_of(policy: Policy | ThresholdBudget) -> Iterator[Policy]:
    """A policy's parts that are known already; itself if it is no union."""
    if isinstance(policy, ThresholdBudget):
        yield from policy.beside
    elif isinstance(policy, Union):
        yield from policy.members
    else:
        yield policy


def _union(members: list[Policy]) -> Policy:
    # One order, because it is part of the recipe, and each once.
    recipes = [member.to_json() for member in members]
    ordered = {(str(r["policy"]), canonical_json(r)): member for r, member in zip(recipes, members, strict=True)}
    policies = tuple(ordered[key] for key in sorted(ordered))
    return policies[0] if len(policies) == 1 else Union(policies)


def _parse_part(text: str, seed: int) -> Policy | ThresholdBudget:
    name, _, value = text.partition(":")
    try:
        match name:
            case "topk" if 1 <= int(value) <= MAX_K:
                return TopK(int(value))
            case "topp" if found := _TOPP.fullmatch(value):
                mass, most = float(found[1]), int(found[2])
                if 0 < mass <= 1 and 1 <= most <= MAX_K:
                    return TopP(mass, most)
            case "sample" if 1 <= int(value) <= MAX_SAMPLE:
                return Sample(int(value), seed)
            case "threshold" if MIN_THETA <= float(value) < math.inf:
                number = float(value)
                return Threshold(number, seed) if number < 1 else ThresholdBudget(number, seed)
            case "given" if value:
                return Given(GivenIds.read(value))
    except ValueError:
        pass
    raise ConfigError(
        f"--select {text!r}: expected topk:K (1 <= K <= {MAX_K}), topp:P,max=K (0 < P <= 1), sample:N (N draws), "
        f"threshold:N (N >= 1 entries on average), threshold:THETA ({MIN_THETA:g} <= THETA < 1), given:URL (a Parquet "
        "file), or some of these joined by +"
    )
