"""The codec of quantised columns: lossless bit for bit, through zarr too, and any damage refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.storage import MemoryStore

from logitstore.codecs.quantised import CODEC_NAME, QuantisedCodec, decode_columns, encode_columns
from logitstore.errors import DamageError
from logitstore.sharding import with_crc

STEPS = ("0.1", "1", "0.0625")


def multiples(whole: np.ndarray, steps: tuple[str, ...] = STEPS) -> np.ndarray:
    """float32 [T, S]: whole numbers times the steps."""
    return whole.astype(np.float32) * np.array([np.float32(step) for step in steps])


def related_columns(num_rows: int, seed: int = 0) -> np.ndarray:
    """A guess's log-prob, a rank and an entropy that hang together, and rows that were not scored."""
    rng = np.random.default_rng(seed)
    first = rng.geometric(0.1, num_rows)
    whole = np.stack(
        [-first, np.where(first < 8, 0, rng.geometric(0.3, num_rows)), first * 2 + rng.integers(0, 3, num_rows)], 1
    )
    values = multiples(whole)
    values[rng.random(num_rows) < 0.05] = np.nan
    return values


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool((a.view(np.uint32) == b.view(np.uint32)).all())


VALUES = st.integers(-300, 300) | st.sampled_from([-(1 << 23), 1 << 23])


@settings(max_examples=60)
@given(st.lists(st.tuples(VALUES, VALUES, VALUES, st.sampled_from([1.0, 1.0, np.nan, -np.inf])), max_size=40))
def test_columns_round_trip(rows):
    values = multiples(np.array([row[:3] for row in rows], np.int64).reshape(-1, 3))
    for number, row in enumerate(rows):
        if not np.isfinite(row[3]):
            values[number, number % 3 :] = row[3]
    assert same_bits(decode_columns(encode_columns(values, STEPS), STEPS, len(values)), values)


def test_columns_that_hang_together_are_smaller_than_apart():
    values = related_columns(20_000)
    together = len(encode_columns(values, STEPS))
    apart = sum(len(encode_columns(values[:, [column]], (STEPS[column],))) for column in range(3))
    assert together < 0.75 * apart


def test_a_column_of_ids_costs_its_entropy():
    rng = np.random.default_rng(0)
    likely_first, weights = rng.permutation(100_000)[:500], 1.0 / np.arange(1, 501)
    shares = weights / weights.sum()
    values = likely_first[rng.choice(500, 50_000, p=shares)].astype(np.float32)[:, None]
    entropy_bytes = -(shares * np.log2(shares)).sum() * len(values) / 8
    assert len(encode_columns(values, ("1",))) < 1.03 * entropy_bytes + 2000


@pytest.mark.parametrize("value", [0.05, np.inf, -0.0, 1e30])
def test_encode_columns_of_other_values_is_refused(value):
    values = multiples(np.arange(6).reshape(2, 3))
    values[1, 0] = value
    with pytest.raises(ValueError, match=r"multiples of 0\.1"):
        encode_columns(values, STEPS)


def test_zarr_writes_and_reads_columns():
    values, store = related_columns(100), MemoryStore()
    options = {"serializer": QuantisedCodec(STEPS), "compressors": None, "fill_value": np.nan}
    array = zarr.create_array(store, name="x", shape=(100, 3), dtype="float32", chunks=(32, 3), **options)
    array[...] = values
    read = zarr.open_group(store, mode="r")["x"]
    assert same_bits(read[...], values)
    assert np.array_equal(read[30:40, 1], values[30:40, 1], equal_nan=True)
    assert read.metadata.to_dict()["codecs"][0]["name"] == CODEC_NAME


@pytest.mark.parametrize(("shape", "dtype"), [((4, 2), "float32"), ((4,), "float32"), ((4, 3), "float64")])
def test_codec_for_other_arrays_is_refused(shape, dtype):
    with pytest.raises(ValueError, match="float32"):
        zarr.create_array(MemoryStore(), shape=shape, dtype=dtype, serializer=QuantisedCodec(STEPS), fill_value=0)


@pytest.mark.parametrize("steps", [None, [], ["0"], ["nan"], ["-1"], [1], ["x"], ["1"] * 255])
def test_codec_with_other_steps_is_refused(steps):
    with pytest.raises(ValueError, match=r"steps|float"):
        QuantisedCodec.from_dict({"name": CODEC_NAME, "configuration": {"steps": steps}})


def test_decode_columns_of_any_flipped_bit_is_refused():
    values = related_columns(12)
    data = encode_columns(values, STEPS)
    for position in range(0, len(data), 2):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(DamageError):
            decode_columns(bytes(damaged), STEPS, 12)


def test_decode_columns_of_mutated_bytes_is_refused_or_of_that_shape():
    """Behind a checksum that holds, as an adversary would write it."""
    data, rng = encode_columns(related_columns(50), STEPS)[:-4], np.random.default_rng(1)
    for _ in range(2000):
        damaged = bytearray(data)
        for position in rng.integers(0, len(data), rng.integers(1, 4)):
            damaged[position] ^= 1 << int(rng.integers(8))
        if rng.random() < 0.3:
            struct.pack_into("<I", damaged, int(rng.integers(0, len(data) - 4)), int(rng.integers(0, 1 << 32)))
        try:
            found = decode_columns(with_crc(bytes(damaged)), STEPS, 50)
        except DamageError:
            continue
        assert found.shape == (50, 3)


def test_decode_columns_of_another_shape_is_refused():
    data = encode_columns(related_columns(12), STEPS)
    for steps, num_rows in ((STEPS, 11), (STEPS[:2], 12)):
        with pytest.raises(DamageError, match="shape"):
            decode_columns(data, steps, num_rows)
