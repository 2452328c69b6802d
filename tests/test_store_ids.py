"""The reference models of the store's benchmark, held to code lengths worked out by hand."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from store_ids import adaptive_bits, stored_bits

from logitstore.sparse import SparseRows, offsets_of

VOCABULARY_SIZE = 1024


def rows_of(rows: list[list[int]]) -> SparseRows:
    ids = np.array([token for row in rows for token in row], np.int32)
    quanta = np.concatenate([np.arange(len(row)) for row in rows]).astype(np.uint16)
    return SparseRows(offsets_of(np.array(list(map(len, rows)))), ids, quanta, np.zeros(len(ids), np.uint16))


def test_adaptive_models_begin_uniform_and_make_no_room_for_what_a_row_has() -> None:
    expected = (np.log2(VOCABULARY_SIZE) + np.log2(VOCABULARY_SIZE - 1)) / 2
    assert adaptive_bits(rows_of([[7, 9]]), VOCABULARY_SIZE) == pytest.approx((expected, expected))


def test_adaptive_models_learn_from_each_row() -> None:
    # After one row of id 7: absolute discounting leaves .6 of the mass to the uniform distribution.
    second = -np.log2(0.4 + 0.6 / VOCABULARY_SIZE)
    assert adaptive_bits(rows_of([[7], [7]]), VOCABULARY_SIZE)[0] == pytest.approx((10 + second) / 2)


def test_order_one_tells_apart_what_follows_different_tokens() -> None:
    alternating = rows_of([[row % 2] for row in range(2000)])
    order_0, order_1 = adaptive_bits(alternating, VOCABULARY_SIZE)
    assert order_0 > 1 > 10 * order_1


def test_stored_ids_cost_about_their_entropy_when_nothing_predicts_them() -> None:
    rng = np.random.default_rng(1)
    bits = stored_bits(rows_of([rng.permutation(VOCABULARY_SIZE)[:8].tolist() for _ in range(20_000)]))
    entropy = np.log2(VOCABULARY_SIZE - np.arange(8)).mean()
    assert 1 < bits / entropy < 1.1
