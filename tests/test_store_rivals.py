"""The rivals' layouts of the store's benchmark: what they give back, and what they cost to the byte."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import store_rivals
from store_rivals import Candidates, DistillKit, Layout, MaxText, Megatron, ParquetZstd, RandomSampling, RawZstd

VOCABULARY_SIZE = 131_072


def candidates(num_rows: int, k: int, vocabulary_size: int = VOCABULARY_SIZE) -> Candidates:
    rng = np.random.default_rng(num_rows)
    ids = np.argsort(rng.random((num_rows, 4 * k)))[:, :k] * (vocabulary_size // (4 * k))
    ids[0, 0] = vocabulary_size - 1
    logprobs = -np.cumsum(rng.exponential(0.2, (num_rows, k)), axis=1)
    return Candidates(ids.astype(np.int32), logprobs.astype(np.float32))


@pytest.mark.parametrize("layout", [MaxText(50), RawZstd(50), ParquetZstd(50)], ids=lambda layout: layout.name)
@pytest.mark.parametrize("num_rows", [1, 5000])
def test_lossless_layouts_give_back_what_they_took(layout: Layout, num_rows: int) -> None:
    rows = candidates(num_rows, 50)
    decoded = layout.decode(layout.encode(rows))
    np.testing.assert_array_equal(decoded.ids, rows.ids)
    np.testing.assert_array_equal(decoded.logprobs, rows.logprobs)


def test_maxtext_writes_protocol_buffers() -> None:
    rows = Candidates(np.array([[1, 300]], np.int32), np.array([[-1.0, -2.0]], np.float32))
    indices = b"\x0a\x18" + b"\x0a\x0dtop_k_indices" + b"\x12\x07" + b"\x1a\x05" + b"\x0a\x03" + b"\x01\xac\x02"
    logits = b"\x0a\x1c" + b"\x0a\x0ctop_k_logits" + b"\x12\x0c" + b"\x12\x0a" + b"\x0a\x08"
    logits += b"\x00\x00\x80\xbf\x00\x00\x00\xc0"
    example = b"\x0a" + bytes([len(indices) + len(logits)]) + indices + logits
    assert MaxText(2).encode(rows) == len(example).to_bytes(4, "little") + example


def test_megatron_rounds_to_half_precision_and_keeps_seventeen_bits() -> None:
    rows = candidates(300, 64)
    decoded = Megatron(64).decode(Megatron(64).encode(rows))
    np.testing.assert_array_equal(decoded.ids, rows.ids)
    np.testing.assert_array_equal(decoded.logprobs, rows.logprobs.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("layout", [Megatron(4), RandomSampling()], ids=lambda layout: layout.name)
def test_layouts_of_seventeen_bits_refuse_wider_ids(layout: Layout) -> None:
    with pytest.raises(ValueError, match="below 2\\^17, found 131072"):
        layout.encode(Candidates(np.full((1, 50), 1 << 17, np.int32), np.zeros((1, 50), np.float32)))


@pytest.mark.parametrize(
    ("make", "vocabulary_size", "row_bytes"),
    [
        (store_rivals.distillkit_recommended, 32_000, 296),
        (store_rivals.distillkit_recommended, 128_256, 328),
        (store_rivals.distillkit_recommended, 151_936, 344),
        (store_rivals.distillkit_budget, 128_256, 121),
        (store_rivals.distillkit_budget, 262_144, 127),
    ],
)
def test_distillkit_costs_what_it_is_known_for(make, vocabulary_size: int, row_bytes: int) -> None:
    layout = make(vocabulary_size)
    rows = candidates(7, layout.k, vocabulary_size)
    data = layout.encode(rows)
    assert len(data) == 7 * row_bytes
    np.testing.assert_array_equal(layout.decode(data).ids, rows.ids)


@pytest.mark.parametrize("make", [store_rivals.distillkit_recommended, store_rivals.distillkit_budget])
def test_distillkit_keeps_curves_of_its_own_terms(make) -> None:
    layout: DistillKit = make(VOCABULARY_SIZE, best_fit=True)
    rows = candidates(3, layout.k)
    place = np.arange(layout.k - layout.exact)
    rows.logprobs[:, layout.exact :] = -12 - 0.01 * place - 0.2 * np.sqrt(place)
    decoded = layout.decode(layout.encode(rows)).logprobs
    np.testing.assert_allclose(decoded[:, layout.exact :], rows.logprobs[:, layout.exact :], atol=2e-4)
    np.testing.assert_allclose(decoded[:, : layout.exact], rows.logprobs[:, : layout.exact], rtol=2**-8)


def test_distillkit_packs_ids_from_the_highest_bit() -> None:
    layout = DistillKit("tiny", 8, 3, 3, ())
    rows = Candidates(np.array([[5, 2, 7]], np.int32), np.array([[-1.0, -2.0, -3.0]], np.float32))
    # bfloat16 of -1, -2, -3, little-endian; then 101 010 111 and seven bits of nothing.
    assert layout.encode(rows).hex() == "80bf" + "00c0" + "40c0" + "ab80"


def test_random_sampling_takes_three_bytes_for_each_distinct_draw() -> None:
    rng = np.random.default_rng(1)
    draws = np.sort(rng.geometric(0.2, (40, 50)) * 9000 % VOCABULARY_SIZE, axis=1).astype(np.int32)
    draws[1:3] = draws[0, 0]  # a row that is all one id, next to another of the same
    counts = [(row == row[:, None]).sum(1) for row in draws]
    rows = Candidates(draws, np.log(np.array(counts, np.float32) / np.float32(50)))
    data = RandomSampling().encode(rows)
    assert len(data) == 3 * sum(len(np.unique(row)) for row in draws)
    decoded = RandomSampling().decode(data)
    np.testing.assert_array_equal(decoded.ids, rows.ids)
    np.testing.assert_array_equal(decoded.logprobs, rows.logprobs)
