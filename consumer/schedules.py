"""Learning-rate schedules: the factor on the peak rate at one step, a pure function, so resuming needs no state."""

from __future__ import annotations

import math

from logitstore.errors import ConfigError

SCHEDULES = ("constant", "linear", "cosine", "wsd")


def learning_rate_factor(
    schedule: str,
    step: int,
    total_steps: int,
    warmup_steps: int = 0,
    *,
    decay_fraction: float = 0.2,
    final: float = 0.0,
) -> float:
    """Factor on the peak learning rate for the update number ``step``.

    Any unit serves (updates, tokens) if it is the same in all three counts. The warm-up rises linearly and reaches 1 at
    its last step, so that no update is wasted on a rate of zero.

    Args:
        schedule: ``constant``; ``linear`` or ``cosine``, falling from the end of the warm-up to the end of training; or
            ``wsd`` (warm-up, stable, decay; Hu et al. 2024, MiniCPM), which falls linearly in the last part only.
        step: of this update, from 0.
        total_steps: length of training; afterwards the factor stays at its end.
        warmup_steps: length of the warm-up.
        decay_fraction: share of ``total_steps`` in which ``wsd`` falls.
        final: factor at the end of the fall.

    Raises:
        ConfigError: an unknown schedule, or numbers out of their range.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"unknown schedule {schedule!r}, expected one of: {', '.join(SCHEDULES)}")
    if total_steps < 1 or warmup_steps < 0 or not 0.0 <= decay_fraction <= 1.0 or not 0.0 <= final <= 1.0:
        raise ConfigError(
            "a schedule needs total_steps >= 1, warmup_steps >= 0, decay_fraction and final in 0..1; found "
            f"{total_steps}, {warmup_steps}, {decay_fraction} and {final}"
        )
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    decay_start = warmup_steps
    if schedule == "wsd":
        decay_start = max(warmup_steps, total_steps - round(decay_fraction * total_steps))
    progress = min(1.0, max(0.0, (step - decay_start) / max(1, total_steps - decay_start)))
    remaining = (1.0 + math.cos(math.pi * progress)) / 2.0 if schedule == "cosine" else 1.0 - progress
    return final + (1.0 - final) * remaining
