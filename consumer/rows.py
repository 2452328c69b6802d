"""The teacher's rows of a batch, decided once for a temperature: masses of listed cells, in log space.

A stored row lists tokens with log-probs over the whole vocabulary. There are two kinds, and the objective of each reads
different numbers from it:

- nothing sampled (top-k, top-p, given ids): the row is exact and comes with the log mass outside it, so it is a
  *partition* {listed, rest} of the teacher's distribution, at any temperature for which that mass was stored. It is
  renormalised here by its own sum, so that the rounding of stored log-probs cannot make a divergence negative.
- sampled: some entries are there for certain and weigh p, the others stand for n draws and weigh n times the weight of
  a draw. The weights are an *unbiased* estimate of the distribution, not a distribution: they sum to 1 only in
  expectation, and must not be renormalised.

Both are log masses by cell, so that projection to another vocabulary merges them in the same way.

Shapes: N positions, K entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from logitstore.errors import ConfigError


@dataclass(frozen=True)
class TeacherRows:
    """What the teacher said at N positions. Column 0 is the realised token, unless the rows were projected."""

    ids_NK: Tensor
    """[N, K] int64 token ids (class ids after projection), distinct within a row; -1 is fill."""
    log_masses_NK: Tensor
    """[N, K] float32, nats: log-prob of each entry in the partition, or log of its weight; -inf is fill."""
    log_rest_N: Tensor | None
    """[N] float32, nats: log-prob of all that is not listed, -inf if nothing is. None: the entries are a sample."""

    @property
    def is_sample(self) -> bool:
        """Whether the masses are weights of a sample, to be used in expectations only."""
        return self.log_rest_N is None

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TeacherRows:
        """The same rows on another device."""
        rest_N = None if self.log_rest_N is None else self.log_rest_N.to(device, non_blocking=non_blocking)
        return replace(
            self,
            ids_NK=self.ids_NK.to(device, non_blocking=non_blocking),
            log_masses_NK=self.log_masses_NK.to(device, non_blocking=non_blocking),
            log_rest_N=rest_N,
        )

    def validate(self) -> None:
        """Check shapes, dtypes, fill, distinct ids, and that a partition sums to one (within 1e-3).

        Raises:
            ValueError: the first of these that does not hold, with the row where it fails.
        """
        found = (self.ids_NK.dtype, self.log_masses_NK.dtype, self.ids_NK.shape == self.log_masses_NK.shape)
        if found != (torch.int64, torch.float32, True):
            raise ValueError(f"expected int64 ids and float32 log masses of one shape, found {found[:2]}")
        ids_NK = self.ids_NK.sort(-1).values
        total_N = self.log_masses_NK.logsumexp(-1)
        checks = {
            "an id is listed twice": ((ids_NK[:, 1:] == ids_NK[:, :-1]) & (ids_NK[:, 1:] >= 0)).any(-1),
            "an id is below -1": (ids_NK < -1).any(-1),
            "fill carries mass": ((self.ids_NK < 0) & (self.log_masses_NK > -math.inf)).any(-1),
            "a mass is not a number": self.log_masses_NK.isnan().any(-1) | (self.log_masses_NK == math.inf).any(-1),
        }
        if self.log_rest_N is not None:
            total_N = torch.logaddexp(total_N, self.log_rest_N)
            checks["the partition does not sum to one"] = ~(total_N.abs() < 1e-3)
        for fault, rows_N in checks.items():
            if bool(rows_N.any()):
                raise ValueError(f"teacher row {int(rows_N.nonzero()[0, 0])} of {len(rows_N)}: {fault}")


def partition_rows(ids_NK: Tensor, logprobs_NK: Tensor, log_rest_N: Tensor, temperature: float = 1.0) -> TeacherRows:
    """Rows of exact entries as the partition {listed, rest} at a temperature, renormalised by its own sum.

    With p the teacher's probabilities at temperature 1, entry i has mass p_i^(1/T) / Z and the rest
    sum_{j not listed} p_j^(1/T) / Z. That sum cannot be recovered from log-probs at temperature 1: it was stored.

    Args:
        ids_NK: [N, K] int64, distinct within a row, -1 for fill.
        logprobs_NK: [N, K] nats over the whole vocabulary, at temperature 1; what stands at fill is ignored.
        log_rest_N: [N] log sum_{j not listed} p_j^(1/T), nats; -inf if nothing is left.
        temperature: T.

    Raises:
        ConfigError: the log-prob of an entry was not stored.
    """
    if bool((logprobs_NK.isnan() & (ids_NK >= 0)).any()):
        raise ConfigError(
            "the log-probs of sampled entries were not stored, and a divergence on the listed tokens needs them: "
            "produce with --sampled-logprobs, or use their weights (sampled_rows)"
        )
    scores_NK = (logprobs_NK.float() / temperature).masked_fill(ids_NK < 0, -math.inf)
    log_rest_N = log_rest_N.float()
    log_sum_N = torch.logaddexp(scores_NK.logsumexp(-1), log_rest_N)
    # A row with nothing in it stays empty instead of turning into nan.
    log_sum_N = log_sum_N.masked_fill(log_sum_N == -math.inf, 0.0)
    return TeacherRows(ids_NK, scores_NK - log_sum_N[:, None], log_rest_N - log_sum_N)


def sampled_rows(
    ids_NK: Tensor, logprobs_NK: Tensor, draws_NK: Tensor, draw_weight: float, temperature: float = 1.0
) -> TeacherRows:
    """Rows of a selection that samples: certain entries weigh their probability, sampled ones what their draws weigh.

    Where n draws are expected p / draw_weight times, n * draw_weight is p in expectation: with ``threshold``, one draw
    with inclusion probability p / theta weighs theta (Horvitz and Thompson, 1952); with ``sample:N``, n out of N draws
    with replacement weigh n / N (Hansen and Hurwitz, 1943).

    Args:
        ids_NK: [N, K] int64, distinct within a row, -1 for fill.
        logprobs_NK: [N, K] nats over the whole vocabulary; ignored at sampled entries and fill.
        draws_NK: [N, K] integers, 0 where the entry is there for certain.
        draw_weight: weight of a draw.
        temperature: of the objective; only 1 can be served.

    Raises:
        ConfigError: another temperature, or a weight that is no probability.
    """
    if not 0.0 < draw_weight <= 1.0:
        raise ConfigError(f"the weight of a draw is {draw_weight}, expected a number in (0, 1]")
    require_unit_temperature(temperature)
    log_draws_NK = draws_NK.float().log() + math.log(draw_weight)
    log_weights_NK = torch.where(draws_NK > 0, log_draws_NK, logprobs_NK.float())
    return TeacherRows(ids_NK, log_weights_NK.masked_fill(ids_NK < 0, -math.inf), None)


def require_unit_temperature(temperature: float) -> None:
    """Refuse sampled rows at a temperature other than 1.

    Raises:
        ConfigError: the temperature is not 1.
    """
    if temperature != 1.0:
        raise ConfigError(
            f"temperature {temperature:g} cannot be served from sampled entries: they were drawn at "
            "temperature 1, and reweighting them multiplies the gradient's variance by 10 at temperature 1.5 and by "
            "hundreds at 2. Train at temperature 1, or produce with a selection that samples nothing, such as topk:64"
        )
