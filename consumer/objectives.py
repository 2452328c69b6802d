"""What a student is trained on: small expressions on what ``head_outputs`` returns, one loss per position, in nats.

| term, rows        | expression                              | against the teacher's whole distribution           |
|-------------------|-----------------------------------------|----------------------------------------------------|
| ``kl``, top-k     | forward KL on {listed, rest}            | a lower bound: differences in the rest are unseen  |
| ``kl``, threshold | sum_i w_i (logsumexp - logit_i)         | unbiased cross-entropy: KL + the teacher's entropy |
| ``ce``            | logsumexp - logit of the realised token | needs no teacher                                   |

The mean over positions is left to the trainer, which knows the one global denominator.

Shapes: N positions, K entries.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from logitstore.errors import ConfigError

TERMS = ("kl", "ce")


@dataclass(frozen=True)
class Objective:
    """Weights of the terms in the loss."""

    terms: Mapping[str, float]
    """Weight by name of the term, out of ``TERMS``."""

    def __post_init__(self) -> None:
        for name, weight in self.terms.items():
            if name not in TERMS:
                nearest = difflib.get_close_matches(name.lower(), TERMS, n=1, cutoff=0.3)
                hint = f"did you mean {nearest[0]!r}?" if nearest else f"known terms: {', '.join(TERMS)}"
                raise ConfigError(f"objective: unknown term {name!r}; {hint}")
            if not 0.0 <= weight < math.inf:
                raise ConfigError(f"objective: the weight of {name!r} is {weight:g}, expected a finite number >= 0")
        if not any(self.terms.values()):
            raise ConfigError("objective: no term has a positive weight, so there is nothing to train on")

    def weight(self, name: str) -> float:
        """Weight of a term, 0 if it is not there."""
        return self.terms.get(name, 0.0)


def parse_objective(text: str) -> Objective:
    """Read an objective such as ``kl:0.9,ce:0.1`` (or with ``=``, as mappings come); a name alone has weight 1.

    Raises:
        ConfigError: an unknown or repeated term, a weight that is no number or negative, or no positive weight.
    """
    terms: dict[str, float] = {}
    for part in text.split(","):
        name, sign, number = (piece.strip() for piece in part.replace("=", ":").partition(":"))
        if name in terms:
            raise ConfigError(f"objective: term {name!r} is there twice in {text!r}")
        try:
            terms[name] = float(number) if sign else 1.0
        except ValueError:
            raise ConfigError(
                f"objective: the weight of {name!r} is {number!r}, expected a number, as in kl:0.9,ce:0.1"
            ) from None
    return Objective(terms)


def token_cross_entropy(logsumexp_N: Tensor, realised_logit_N: Tensor) -> Tensor:
    """Cross-entropy to the realised token, [N] nats: logsumexp - its logit, both at temperature 1."""
    return logsumexp_N - realised_logit_N
