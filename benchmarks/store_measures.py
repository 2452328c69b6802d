"""Each layout's size, distortion and speed on the same rows, in one process.

Shapes: T rows, K candidates.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from store_corpus import corpus_bytes, load_tokenizer
from store_ids import adaptive_bits, stored_bits
from store_ours import OurRows, stage_all_scalars, stage_inputs, threshold, top_k, uploaded
from store_rivals import (
    Candidates,
    Layout,
    MaxText,
    Megatron,
    ParquetZstd,
    RandomSampling,
    RawZstd,
    distillkit_budget,
    distillkit_recommended,
)
from store_rows import TeacherRows

from logitstore.codecs.row_encoder import encode_rows
from logitstore.codecs.row_stream import decode_rows
from logitstore.staging import StagedPart

_REPEATS, _FEWEST, _ENOUGH_SECONDS = 5, 3, 6.0
_FULL_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class Measured:
    """One line of the table; None where a column says nothing of it.

    Attributes:
        name: of the layout.
        num_bytes: a token.
        kl: generalised, nats a row.
        max_error: nats.
        encode_rate, decode_rate: tokens a second of one core.
        id_bits: what is stored an id, and the models of order 0 and 1.
    """

    name: str
    num_bytes: float
    kl: float | None
    max_error: float | None
    encode_rate: float | None
    decode_rate: float
    id_bits: tuple[float, float, float] | None = None


def measure_rival(layout: Layout, rows: Candidates, *, is_estimate: bool = False) -> Measured:
    data = layout.encode(rows)
    decoded = layout.decode(data)
    assert (decoded.ids == rows.ids).all(), layout.name
    kl, max_error = (None, None) if is_estimate else _distortion(rows.logprobs, decoded.logprobs, len(rows.ids))
    return Measured(
        layout.name,
        len(data) / len(rows.ids),
        kl,
        max_error,
        len(rows.ids) / _seconds(lambda: layout.encode(rows)),
        len(rows.ids) / _seconds(lambda: layout.decode(data)),
    )


def measure_ours(ours: OurRows, vocabulary_size: int, full_block_rows: float) -> Measured:
    """Size is that of a whole part; speed is that of the stream, checksums included."""
    rows, data = ours.rows, encode_rows(ours.rows)
    decoded = decode_rows(data)
    for field in ("offsets", "ids", "quanta", "draws"):
        np.testing.assert_array_equal(getattr(decoded, field), getattr(rows, field))
    known = ~np.isnan(rows.logprobs())
    kl, max_error = _distortion(ours.truth[known], rows.logprobs()[known], rows.num_rows)
    return Measured(
        ours.name,
        _bytes_a_token(ours.stage(), rows.num_rows, full_block_rows),
        kl,
        max_error,
        rows.num_rows / _seconds(lambda: encode_rows(rows)),
        rows.num_rows / _seconds(lambda: decode_rows(data)),
        (stored_bits(rows), *adaptive_bits(rows, vocabulary_size)),
    )


def measure_scalars(teacher: TeacherRows, full_block_rows: float) -> Measured:
    """Speed is that of whole parts: staging with digests, reading with verification."""
    part = stage_all_scalars(teacher)
    opened = uploaded(part)
    error = np.abs(opened().array("scalars")[:, 0] - teacher.realised_logp).max()
    return Measured(
        "scalars, all eight",
        _bytes_a_token(part, teacher.num_rows, full_block_rows),
        None,
        float(error),
        teacher.num_rows / _seconds(lambda: stage_all_scalars(teacher)),
        teacher.num_rows / _seconds(lambda: opened().array("scalars")),
    )


def measure_inputs(vocabulary: str, full_block_rows: float) -> Iterator[Measured]:
    """Text and token ids, which no signal's bytes have in them. Reading has every byte checked."""
    *parts, num_tokens = stage_inputs(vocabulary)
    for name, array, part in zip(("text", "token ids"), ("bytes", "tokens"), parts, strict=True):
        opened = uploaded(part)
        yield Measured(
            f"apart: {name}",
            _bytes_a_token(part, num_tokens, full_block_rows),
            None,
            None,
            None,
            num_tokens / _seconds(lambda opened=opened, array=array: opened().array(array)),
        )


def measure_all(teacher: TeacherRows, vocabulary: str) -> Iterator[Measured]:
    _, size = load_tokenizer(vocabulary)
    num_tokens, num_bytes = corpus_bytes(vocabulary)
    full_block_rows = _FULL_BLOCK_BYTES * num_tokens / num_bytes

    def first(k: int) -> Candidates:
        return Candidates(*(np.ascontiguousarray(table[:, :k]) for table in (teacher.topk_ids, teacher.topk_logp)))

    distillkit = [distillkit_recommended(size), distillkit_recommended(size, best_fit=True)]
    for layout in (MaxText(128), RawZstd(128), ParquetZstd(128), Megatron(128), *distillkit):
        yield measure_rival(layout, first(128))
    for step in (0.05, 0.1, 0.25):
        yield measure_ours(top_k(teacher, 128, step), size, full_block_rows)
    for step, tail in ((0.1, 1.6), (0.125, 2.0), (0.18, 2.9)):
        yield measure_ours(top_k(teacher, 128, step, tail), size, full_block_rows)
    for layout in (MaxText(64), Megatron(64)):
        yield measure_rival(layout, first(64))
    yield measure_ours(top_k(teacher, 64, 0.1), size, full_block_rows)
    for layout in (distillkit_budget(size), distillkit_budget(size, best_fit=True)):
        yield measure_rival(layout, first(50))
    yield measure_ours(top_k(teacher, 50, 0.1), size, full_block_rows)
    for step, tail in ((0.1, 1.6), (0.25, 4.0), (0.3, 4.0)):
        yield measure_ours(top_k(teacher, 50, step, tail), size, full_block_rows)
    yield measure_rival(RandomSampling(), _draws(teacher), is_estimate=True)
    yield measure_ours(threshold(teacher, 0.1, sampled_logprobs=False), size, full_block_rows)
    yield measure_ours(threshold(teacher, 0.1, sampled_logprobs=True), size, full_block_rows)
    yield measure_scalars(teacher, full_block_rows)
    yield from measure_inputs(vocabulary, full_block_rows)


def _draws(teacher: TeacherRows) -> Candidates:
    counts = (teacher.draws[:, :, None] == teacher.draws[:, None, :]).sum(-1)
    return Candidates(teacher.draws, np.log(counts.astype(np.float32) / np.float32(teacher.draws.shape[1])))


def _bytes_a_token(part: StagedPart, num_rows: int, full_block_rows: float) -> float:
    """Chunks by the rows they hold; seal and metadata by those of a block of full size."""
    chunks = sum(len(data) for name, data in part.objects.items() if not name.endswith("zarr.json"))
    return chunks / num_rows + (part.num_bytes - chunks) / max(num_rows, full_block_rows)


def _distortion(truth: np.ndarray, decoded: np.ndarray, num_rows: int) -> tuple[float, float]:
    """Generalised KL in nats a row, and the largest error in nats, over stored entries."""
    truth, decoded = truth.astype(np.float64), decoded.astype(np.float64)
    terms = np.exp(truth) * (truth - decoded) - np.exp(truth) + np.exp(decoded)
    return float(terms.sum() / num_rows), float(np.abs(truth - decoded).max())


def _seconds(work: Callable[[], object]) -> float:
    """Median of the processor's seconds, after a first run that compiles."""
    work()
    found = []
    for _ in range(_REPEATS):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
        if len(found) >= _FEWEST and sum(found) > _ENOUGH_SECONDS:
            break
    return max(statistics.median(found), 1e-9)
