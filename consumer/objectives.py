"""What a student is trained on: terms with weights, and how several teachers share them.

The terms, what each needs and what it is worth are in docs/objectives.md. The mean over positions is left to the
trainer, which knows the one global denominator.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from logitstore.errors import ConfigError

TERMS = (
    "kl",
    "ce",
    "projected_kl",
    "first_byte_kl",
    "chunk_likelihood",
    "gold",
    "uld",
    "xtoken_pkl",
    "xtoken_hkl",
)
OVER_TEACHER_TOKENS = frozenset({"first_byte_kl", "gold", "uld", "xtoken_pkl", "xtoken_hkl"})
"""Terms that need a teacher's own entries: signals projected to the student's vocabulary do not serve them."""
CHARGED_BY_SPAN = frozenset({"chunk_likelihood", "gold", "xtoken_hkl"})
"""Terms that charge one token of a span with all of it."""
TEACHER_WEIGHTINGS = ("static", "ce", "entropy", "max_prob", "select")


@dataclass(frozen=True)
class Objective:
    """Terms of the loss with their weights."""

    terms: Mapping[str, float]
    """Weight by name of the term, out of ``TERMS``."""
    tau: float = 100.0
    """Of ``chunk_likelihood``: chunks are compared by their probability to the power of 1 / tau."""
    debias: bool = True
    """Whether ``chunk_likelihood`` leaves out chunks that one side's tokenizer would hardly end there."""
    teacher_weighting: str = "static"
    """How teachers share a token, out of ``TEACHER_WEIGHTINGS``; see ``teacher_weighting``."""
    teacher_alpha: float = 1.0
    """How much their scores count there."""

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
        if self.teacher_weighting not in TEACHER_WEIGHTINGS:
            known = ", ".join(TEACHER_WEIGHTINGS)
            raise ConfigError(f"--teacher-weighting {self.teacher_weighting!r}: expected one of {known}")
        if not 0.0 < self.tau < math.inf:
            raise ConfigError(f"--tau {self.tau:g}: expected a positive number")
        if not 0.0 <= self.teacher_alpha < math.inf:
            raise ConfigError(f"--teacher-alpha {self.teacher_alpha:g}: expected a finite number >= 0")

    def weight(self, name: str) -> float:
        """Weight of a term, 0 if it is not there."""
        return self.terms.get(name, 0.0)

    @property
    def teacher_terms(self) -> tuple[str, ...]:
        """Terms that count and that teachers have a say in."""
        return tuple(name for name, weight in self.terms.items() if name != "ce" and weight > 0)

    @property
    def needs_teacher_tokens(self) -> bool:
        return not OVER_TEACHER_TOKENS.isdisjoint(self.teacher_terms)


def parse_objective(text: str, **options: Any) -> Objective:
    """Read an objective such as ``kl:0.9,ce:0.1`` (or with ``=``, as mappings come); a name alone has weight 1.

    Args:
        text: terms with their weights.
        options: other fields of the objective.

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
    return Objective(terms, **options)
