"""The statistics of the study of cross-tokenizer objectives."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from cross_report import interval, ratio_interval


def test_interval_is_students() -> None:
    found = interval(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert found.mean == 3.0
    assert found.high - found.mean == pytest.approx(2.776 * math.sqrt(2.5 / 5))
    assert found.mean - found.low == pytest.approx(found.high - found.mean)


def test_interval_of_one_value_is_unknown() -> None:
    assert math.isnan(interval(np.array([1.0])).low)


def test_ratio_of_a_constant_denominator_is_the_interval_of_the_numerator() -> None:
    values = np.array([0.7, 0.9, 0.8, 0.85, 0.75])
    assert ratio_interval(values * 2, np.full(5, 2.0)) == pytest.approx(interval(values))


def test_ratio_ends_are_where_paired_differences_are_just_significant() -> None:
    rng = np.random.default_rng(1)
    denominator = 0.2 + 0.01 * rng.standard_normal(5)
    numerator = 0.8 * denominator + 0.01 * rng.standard_normal(5)
    found = ratio_interval(numerator, denominator)
    for end in (found.low, found.high):
        differences = interval(numerator - end * denominator)
        assert min(abs(differences.low), abs(differences.high)) == pytest.approx(0.0, abs=1e-12)
    assert found.low < found.mean < found.high


def test_ratio_to_something_that_may_be_zero_has_no_bounds() -> None:
    assert ratio_interval(np.array([1.0, 1.1, 0.9]), np.array([0.1, -0.1, 0.05])).high == math.inf
