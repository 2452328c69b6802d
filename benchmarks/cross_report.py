"""What the study writes down: means over paired seeds, with the intervals of Student's t."""

from __future__ import annotations

import math
from textwrap import fill
from typing import NamedTuple

import numpy as np
from cross_runs import REFERENCE, TEXT, Arm
from cross_setup import OTHER, SAME, Study, tokens_per_byte

_T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Quantiles of Student's t by degrees of freedom: 95 % of it lies within."""
GOAL, GOAL_LOWER = 0.80, 0.65


class Interval(NamedTuple):
    mean: float
    low: float
    high: float


def interval(values: np.ndarray) -> Interval:
    """Mean [N] with its 95 % confidence interval."""
    mean, num = float(values.mean()), len(values)
    if num < 2:
        return Interval(mean, math.nan, math.nan)
    half = _T_975[num - 1] * float(values.std(ddof=1)) / math.sqrt(num)
    return Interval(mean, mean - half, mean + half)


def ratio_interval(numerator: np.ndarray, denominator: np.ndarray) -> Interval:
    """Ratio of two paired means with its 95 % confidence interval, by Fieller's theorem.

    The interval is all r for which the paired differences numerator - r * denominator do not differ from zero.
    """
    num = len(numerator)
    ratio = float(numerator.mean() / denominator.mean())
    if num < 2:
        return Interval(ratio, math.nan, math.nan)
    (var_n, cov), (_, var_d) = np.cov(numerator, denominator) / num
    t2 = _T_975[num - 1] ** 2
    a = denominator.mean() ** 2 - t2 * var_d
    b = numerator.mean() * denominator.mean() - t2 * cov
    c = numerator.mean() ** 2 - t2 * var_n
    if a <= 0 or b * b < a * c:
        return Interval(ratio, -math.inf, math.inf)  # the denominator may be zero
    root = math.sqrt(b * b - a * c)
    return Interval(ratio, float((b - root) / a), float((b + root) / a))


def report(study: Study, bits: dict[Arm, list[float]], teachers: dict[str, float]) -> str:
    """Args: ``bits`` are held-out bits per byte by arm, seed by seed; ``teachers`` those of the teachers."""
    text = np.array(bits[TEXT])
    gain = text - np.array(bits[REFERENCE])
    rows = [
        ("objective", "weights", "rows", "bits per byte", "gain over text alone", "share of the same-tokenizer gain")
    ]
    rows.append(("---", "---", "---", "---:", "---:", "---:"))
    shares: dict[Arm, Interval] = {}
    for arm, found in sorted(
        bits.items(), key=lambda item: (item[0] is not TEXT, item[0] is not REFERENCE, np.mean(item[1]))
    ):
        gains, cells = text - np.array(found), ["", ""]
        if arm is not TEXT:
            cells[0] = _spelled(interval(gains), ".3f")
        if arm not in (TEXT, REFERENCE):
            shares[arm] = ratio_interval(gains, gain)
            cells[1] = _spelled(Interval(*(100 * each for each in shares[arm])), ".0f")
        rows.append((arm.name, arm.objective, arm.selection if arm.teacher else "", f"{np.mean(found):.4f}", *cells))
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return "\n\n".join([_describe(study, teachers), table, _goal(shares)])


def _describe(study: Study, teachers: dict[str, float]) -> str:
    sizes, rates = study.sizes, tokens_per_byte(study)
    students = f"""
        {sizes.num_seeds} students of width {sizes.student_width} from random weights, each trained on
        {sizes.student_steps * sizes.student_batch:,} tokens of a vocabulary of {sizes.student_vocabulary:,} under each
        objective; a seed has the same weights, tokens and order under all. Gains are paired by seed; brackets are 95 %
        confidence intervals (Student's t, n = {sizes.num_seeds}; of shares, Fieller's). Bits per byte are of documents
        that neither students nor teachers nor tokenizers saw."""
    both = f"""
        Both teachers have width {sizes.teacher_width} and learned from the same documents. The one of the student's
        tokenizer (a byte-fallback BPE, {rates["student"]:.3f} tokens a byte) saw {sizes.teacher_tokens:,} tokens and
        has {teachers[SAME]:.4f} held-out bits per byte; the other's is a ByteLevel BPE of {sizes.teacher_vocabulary:,}
        tokens ({rates["teacher"]:.3f} a byte): it saw {100 * sizes.other_bytes:.0f} % of the bytes, so that it is no
        better a teacher, and has {teachers[OTHER]:.4f}."""
    return "\n\n".join(fill(" ".join(text.split()), 120) for text in (students, both))


def _goal(shares: dict[Arm, Interval]) -> str:
    if not shares:
        return "No objective across tokenizers was run."
    best = max(shares, key=lambda arm: shares[arm].mean)
    share = shares[best]
    met = share.mean >= GOAL and share.low >= GOAL_LOWER
    return (
        f"- {'met' if met else '**missed**'}: {best.name}, {best.selection}: share of the same-tokenizer gain "
        f"{share.mean:.2f}, lower end {share.low:.2f}; {GOAL:.2f} and {GOAL_LOWER:.2f} were asked"
    )


def _spelled(found: Interval, form: str) -> str:
    return f"{found.mean:{form}} [{found.low:{form}}, {found.high:{form}}]"
