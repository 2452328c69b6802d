"""Learning-rate schedules: their ends, their shapes and what they refuse."""

from __future__ import annotations

import pytest

from logitstore.consumer.schedules import SCHEDULES, learning_rate_factor
from logitstore.errors import ConfigError


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_rises_linearly_to_one_and_never_is_zero(schedule: str) -> None:
    factors = [learning_rate_factor(schedule, step, 100, 10) for step in range(10)]
    assert factors == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert learning_rate_factor(schedule, 10, 100, 10) == 1.0


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_fall_is_monotone_and_ends_at_final(schedule: str, final: float) -> None:
    factors = [learning_rate_factor(schedule, step, 100, 10, final=final) for step in range(10, 130)]
    assert factors == sorted(factors, reverse=True)
    assert factors[90:] == pytest.approx([final] * 30)
    assert 0.0 < factors[89] - final < 0.06


def test_values_halfway() -> None:
    assert learning_rate_factor("linear", 55, 100, 10) == pytest.approx(0.5)
    assert learning_rate_factor("cosine", 55, 100, 10, final=0.1) == pytest.approx(0.55)
    assert learning_rate_factor("wsd", 79, 100, 10) == 1.0
    assert learning_rate_factor("wsd", 90, 100, 10) == pytest.approx(0.5)
    assert learning_rate_factor("wsd", 75, 100, 10, decay_fraction=0.5) == pytest.approx(0.5)
    assert learning_rate_factor("constant", 10**9, 100, 10) == 1.0


def test_warmup_longer_than_training_still_rises() -> None:
    assert learning_rate_factor("cosine", 4, 5, 10) == 0.5
    assert learning_rate_factor("cosine", 10, 5, 10) == 1.0


@pytest.mark.parametrize(
    "change",
    [{"schedule": "cosin"}, {"total_steps": 0}, {"warmup_steps": -1}, {"decay_fraction": 1.5}, {"final": -0.1}],
)
def test_numbers_out_of_range_are_refused(change: dict[str, object]) -> None:
    given: dict[str, object] = {"schedule": "wsd", "step": 0, "total_steps": 10, "warmup_steps": 1}
    with pytest.raises(ConfigError, match="schedule"):
        learning_rate_factor(**{**given, **change})  # type: ignore[arg-type]
