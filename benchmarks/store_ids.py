"""What token ids cost at least: ideal code lengths of adaptive models, and what a stored stream spends on them.

The reference models read the ids of a row in the order of their log-probs, and learn from each row after it. Order 0
knows how often each id stood in any row; order 1 how often it stood in rows after the same token, and where that says
nothing it asks order 0, which asks a uniform distribution. What the counts leave for the lower order is absolute
discounting's share (Ney, Essen, Kneser 1994). Neither gives room to ids that the row has already.
"""

from __future__ import annotations

import numba
import numpy as np

from logitstore.codecs import row_contexts
from logitstore.codecs.rans import ALPHABET, code_bits, count_symbols
from logitstore.codecs.row_encoder import RowWriter, encode_rows
from logitstore.codecs.row_stream import GROUP_ROWS
from logitstore.sparse import SparseRows

_DISCOUNT = 0.6


def stored_bits(rows: SparseRows) -> float:
    """Bits an id that ``encode_rows`` spends: all of the stream but what log-probs, counts and draws cost ideally."""
    writer = RowWriter(rows, GROUP_ROWS, min((1 << 32) - 1, round(np.exp(-rows.step_nats) * (1 << 32))))
    counts_CS = np.zeros((row_contexts.NUM_CONTEXTS, ALPHABET), np.int64)
    for begin in range(0, rows.num_rows, GROUP_ROWS):
        count_symbols(*writer.write(begin, min(begin + GROUP_ROWS, rows.num_rows)), counts_CS)
    others = code_bits(counts_CS[: row_contexts.PLACE])
    return (8 * len(encode_rows(rows)) - others) / rows.num_entries


def adaptive_bits(rows: SparseRows, vocabulary_size: int) -> tuple[float, float]:
    """Bits an id of the models of order 0 and 1."""
    slots = 1 << (2 * rows.num_entries - 1).bit_length()
    pairs, counts = np.full(slots, -1, np.int64), np.zeros(slots, np.int32)
    bits = _adaptive_bits(rows.offsets, rows.ids, vocabulary_size, _DISCOUNT, pairs, counts)
    return bits[0] / rows.num_entries, bits[1] / rows.num_entries


@numba.njit(cache=True)
def _slot(pairs: np.ndarray, pair: np.int64) -> np.int64:
    """Where a pair of tokens stands in a table of a power of two, or where it may be put."""
    mask = np.uint64(len(pairs) - 1)
    at = ((np.uint64(pair) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20)) & mask
    while pairs[at] != pair and pairs[at] != -1:
        at = (at + np.uint64(1)) & mask
    return at


@numba.njit(cache=True)
def _adaptive_bits(
    offsets: np.ndarray, ids: np.ndarray, vocabulary_size: int, discount: float, pairs: np.ndarray, counts: np.ndarray
) -> tuple[float, float]:
    count_V, total, distinct = np.zeros(vocabulary_size), 0.0, 0.0
    total_V, distinct_V = np.zeros(vocabulary_size), np.zeros(vocabulary_size)  # of rows after each token
    bits_0, bits_1, previous = 0.0, 0.0, -1
    for row in range(len(offsets) - 1):
        begin, end = offsets[row], offsets[row + 1]
        left_0, left_1 = 1.0, 1.0
        for entry in range(begin, end):
            token = ids[entry]
            p_0 = 1.0 / vocabulary_size
            if total:
                p_0 = (max(0.0, count_V[token] - discount) + discount * distinct * p_0) / total
            p_1 = p_0
            if previous >= 0 and total_V[previous]:
                count = counts[_slot(pairs, np.int64(previous) * vocabulary_size + token)]
                p_1 = (max(0.0, count - discount) + discount * distinct_V[previous] * p_0) / total_V[previous]
            bits_0 -= np.log2(min(1.0, p_0 / max(left_0, p_0)))
            bits_1 -= np.log2(min(1.0, p_1 / max(left_1, p_1)))
            left_0, left_1 = max(left_0 - p_0, 1e-12), max(left_1 - p_1, 1e-12)
        for entry in range(begin, end):
            token = ids[entry]
            distinct += count_V[token] == 0
            count_V[token] += 1
            total += 1
            if previous >= 0:
                pair = np.int64(previous) * vocabulary_size + token
                at = _slot(pairs, pair)
                distinct_V[previous] += pairs[at] == -1
                pairs[at] = pair
                counts[at] += 1
                total_V[previous] += 1
        previous = ids[begin] if end > begin else -1
    return bits_0, bits_1
