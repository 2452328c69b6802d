"""The codec of sparse rows: lossless, small, as zarr writes and reads it whole and in part, never fooled by damage."""

from __future__ import annotations

import itertools
import json
import struct
import threading
import tracemalloc

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_strategies import assert_equal_rows, random_rows, rows_of, sparse_rows
from zarr.core.buffer import cpu
from zarr.storage import MemoryStore

from logitstore.codecs import row_stream
from logitstore.codecs.row_encoder import encode_rows
from logitstore.codecs.row_stream import HEADER_BYTES, Header, RowReader, decode_rows
from logitstore.codecs.sparse_rows import CODEC_NAME, SparseRowsCodec, decode_chunk
from logitstore.errors import DamageError
from logitstore.sparse import FILL, NOT_STORED, SparseRows, offsets_of

KEY = "sparse/c/0/0"


def zarr_array(store: MemoryStore, num_rows: int, width: int, chunk_rows: int | None = None, **options) -> zarr.Array:
    """An empty array as parts lay it out."""
    return zarr.create_array(
        store,
        name="sparse",
        shape=(num_rows, width),
        dtype="uint64",
        chunks=(chunk_rows or max(1, num_rows), width),
        serializer=SparseRowsCodec(),
        compressors=None,
        fill_value=int(FILL),
        **options,
    )


def width_of(rows: SparseRows) -> int:
    return max(1, int(rows.counts.max(initial=0)))


def order_1_rows(num_rows: int, num_entries: int, vocabulary: int = 600, seed: int = 0) -> SparseRows:
    """Rows of which each is drawn from one of 12 distributions, chosen by which of 12 tokens came before."""
    rng = np.random.default_rng(seed)
    likely_first = rng.permuted(np.tile(np.arange(vocabulary), (12, 1)), axis=1)
    weights = 1.0 / np.arange(1, vocabulary + 1) ** 1.3
    weights /= weights.sum()
    rows, previous = [], 0
    for _ in range(num_rows):
        ids = np.sort(likely_first[previous][np.unique(rng.choice(vocabulary, num_entries, p=weights))]).tolist()
        previous = int(rng.integers(12))
        rows.append([(vocabulary + previous, 1, 0), *((number, 1, 0) for number in ids)])
    return rows_of(rows)


# The stream itself


@given(sparse_rows(), st.sampled_from([1, 2, 5, 4096]))
def test_rows_round_trip(rows, group_rows):
    assert_equal_rows(decode_rows(encode_rows(rows, group_rows)), rows)


@pytest.mark.parametrize("mean_entries", [0.3, 4.0, 40.0])
@pytest.mark.parametrize("group_rows", [7, 64, 4096])
def test_many_rows_round_trip(mean_entries, group_rows):
    rows = random_rows(300, mean_entries=mean_entries)
    assert_equal_rows(decode_rows(encode_rows(rows, group_rows)), rows)


def test_one_row_of_65535_entries_round_trips():
    """More members than a set may have, all of one quantum."""
    for draws, quanta in ((0, 7), (1, NOT_STORED)):
        others = [(number, quanta, draws) for number in range(0, 3 * 65534, 3)]
        rows = rows_of([[(1, 7, 0), *others], [], [(1, 9, 0)]])
        assert_equal_rows(decode_rows(encode_rows(rows)), rows)


@pytest.mark.parametrize(
    "row",
    [
        [(5, 1, 1)],
        [(5, 1, 0), (7, 3, 0), (6, 2, 0)],
        [(5, 1, 0), (7, 3, 0), (6, 3, 0)],
        [(5, 1, 0), (7, 3, 0), (7, 3, 0)],
        [(5, 1, 0), (5, 1, 0)],
    ],
)
def test_encode_rows_in_another_order_is_refused(row):
    with pytest.raises(ValueError, match=r"row 1: .* ascending order"):
        encode_rows(rows_of([[(1, 1, 0)], row]))


def test_encode_rows_with_more_entries_than_a_row_may_have_is_refused():
    with pytest.raises(ValueError, match="65535 entries"):
        encode_rows(rows_of([[(number, number % 60000, 0) for number in range(0x10000)]]))


def test_encode_rows_with_a_negative_id_is_refused():
    with pytest.raises(ValueError, match="ids from 0"):
        encode_rows(rows_of([[(-1, 1, 0)]]))


def test_order_within_a_set_is_not_paid_for():
    """30 ids of one quantum from 2^15 cost log2 of the number of such sets, not 30 times 15 bits."""
    rng = np.random.default_rng(0)
    vocabulary, size, num_rows = 1 << 15, 30, 2000
    rows = []
    for _ in range(num_rows):
        ids = np.sort(rng.choice(vocabulary, size, replace=False)).tolist()
        rows.append([(ids[0], 5, 0), *((number, 5, 0) for number in ids[1:])])
    bits = 8 * len(encode_rows(rows_of(rows))) / num_rows
    order_bits = np.log2(np.arange(1, size + 1)).sum()
    assert order_bits > 107
    model_bits = 8 * Header.parse(encode_rows(rows_of(rows))).model_bytes / num_rows
    assert bits - model_bits < 15 * size - order_bits + 12  # + which of them is the realised one, and slack


def test_ids_of_an_order_1_source_cost_less_than_its_order_0_entropy():
    rows = order_1_rows(4000, 12)
    counts = np.bincount(rows.ids)
    shares = counts[counts > 0] / rows.num_entries
    order_0_bytes = -(shares * np.log2(shares)).sum() * rows.num_entries / 8
    assert len(encode_rows(rows)) < 0.75 * order_0_bytes


def test_groups_can_be_read_alone():
    rows = random_rows(103)
    data = memoryview(encode_rows(rows, group_rows=10))
    reader = RowReader(data[: Header.parse(data).front_bytes])
    for first, last in itertools.combinations(range(12), 2):
        begin, end = reader.group_bytes(first, last)
        wanted = rows.slice_rows(min(103, 10 * first), min(103, 10 * last))
        assert_equal_rows(reader.read(data[begin:end], first, last), wanted)


def test_rows_are_decoded_into_the_callers_arrays():
    rows = random_rows(50)
    data = memoryview(encode_rows(rows, group_rows=8))
    reader = RowReader(data)
    counts, ids = np.full(60, -7), np.full(rows.num_entries + 3, -7, np.int32)
    quanta, draws = np.zeros(rows.num_entries, np.uint16), np.zeros(rows.num_entries, np.uint16)
    reader.read_into(data[reader.header.front_bytes :], counts[:50], ids[:-3], quanta, draws)
    assert_equal_rows(SparseRows(offsets_of(counts[:50]), ids[:-3], quanta, draws), rows)
    assert (counts[50:] == -7).all()
    assert (ids[-3:] == -7).all()


def test_threads_decode_at_once():
    rows = random_rows(400)
    data, results = encode_rows(rows), []
    threads = [threading.Thread(target=lambda: results.append(decode_rows(data))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found in results:
        assert_equal_rows(found, rows)
    assert len(results) == 4


# Through zarr


@settings(max_examples=25)
@given(sparse_rows(max_rows=30))
def test_zarr_reads_what_we_write_and_we_read_what_zarr_writes(rows):
    store, width = MemoryStore(), width_of(rows)
    array = zarr_array(store, rows.num_rows, width, config={"write_empty_chunks": True})
    array[...] = rows.rectangle(width)
    if rows.num_rows:
        assert_equal_rows(decode_chunk(store._store_dict[KEY].to_bytes(), rows.num_rows, width), rows)
        store._store_dict[KEY] = cpu.Buffer.from_bytes(encode_rows(rows))
    assert (zarr.open_group(store, mode="r")["sparse"][...] == rows.rectangle(width)).all()


@pytest.mark.parametrize("sharded", [False, True])
def test_zarr_reads_parts_of_an_array(tmp_path, monkeypatch, sharded):
    """Plain ``zarr.open_group`` on a folder, with nothing of ours imported by the reader but the registered codec."""
    monkeypatch.setattr(row_stream, "GROUP_ROWS", 8)
    monkeypatch.setattr(SparseRowsCodec, "_encode_sync", _encode_in_groups_of_8)
    rows = random_rows(80)
    width = width_of(rows)
    table = rows.rectangle(width)
    group = zarr.open_group(str(tmp_path / "part"), mode="w")
    array = zarr_array(group.store, 80, width, chunk_rows=40, shards=(80, width) if sharded else None)
    array[...] = table
    read = zarr.open_group(str(tmp_path / "part"), mode="r")["sparse"]
    wanted_rows = [slice(0, 1), slice(7, 9), slice(30, 61, 3), slice(None), slice(5, 5), 79, np.array([3, 70, 41])]
    for wanted, columns in itertools.product(wanted_rows, [slice(None), slice(1, 3), 0]):
        assert np.array_equal(read.oindex[wanted, columns], table[wanted, columns])
        if not isinstance(wanted, np.ndarray):
            assert np.array_equal(read[wanted, columns], table[wanted, columns])
    metadata = json.loads((tmp_path / "part/sparse/zarr.json").read_text())
    assert CODEC_NAME in json.dumps(metadata["codecs"])


def _encode_in_groups_of_8(codec, chunk_array, chunk_spec):
    rows = SparseRows.from_rectangle(chunk_array.as_numpy_array())
    return chunk_spec.prototype.buffer.from_bytes(encode_rows(rows, group_rows=8))


def test_zarr_fetches_only_the_groups_that_hold_the_rows():
    rows = order_1_rows(6000, 10)
    width, store = width_of(rows), _CountingStore()
    zarr_array(store, rows.num_rows, width)
    data = encode_rows(rows, group_rows=64)
    store._store_dict[KEY] = cpu.Buffer.from_bytes(data)
    array = zarr.open_group(store, mode="r")["sparse"]
    _CountingStore.bytes_read = 0
    assert (array[4000:4010] == rows.rectangle(width)[4000:4010]).all()
    front = max(Header.parse(data).front_bytes, 1 << 16)
    assert 0 < _CountingStore.bytes_read < front + len(data) / 20


class _CountingStore(MemoryStore):
    bytes_read = 0

    async def get(self, key, prototype, byte_range=None):
        found = await super().get(key, prototype, byte_range)
        _CountingStore.bytes_read += len(found) if found is not None else 0
        return found


def test_zarr_updates_part_of_an_array():
    rows = random_rows(32)
    width, store = width_of(rows), MemoryStore()
    array = zarr_array(store, rows.num_rows, width, chunk_rows=8)
    table = rows.rectangle(width)
    array[...] = table
    array[5:20] = table[5:20] = FILL
    assert (array[...] == table).all()


@pytest.mark.parametrize(("shape", "dtype"), [((4, 2), "int32"), ((8,), "uint64"), ((2, 2, 2), "uint64")])
def test_codec_for_other_arrays_is_refused(shape, dtype):
    with pytest.raises(ValueError, match="uint64"):
        zarr.create_array(MemoryStore(), shape=shape, dtype=dtype, serializer=SparseRowsCodec(), fill_value=0)


def test_zarr_write_of_entries_right_of_fill_is_refused():
    array = zarr_array(MemoryStore(), 8, 2)
    with pytest.raises(ValueError, match="right of fill"):
        array[...] = np.tile(np.array([FILL, 1], np.uint64), (8, 1))


def test_codec_in_metadata_reads_back():
    assert SparseRowsCodec.from_dict({"name": CODEC_NAME}) == SparseRowsCodec()
    assert SparseRowsCodec().to_dict() == {"name": CODEC_NAME}
    with pytest.raises(NotImplementedError):
        SparseRowsCodec().compute_encoded_size(100, None)


# Damage


@pytest.fixture
def memory_limit():
    """Fails if a test ever held more than 16 MiB: adversarial sizes must be refused before they are allocated."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


def test_decode_rows_of_any_flipped_bit_is_refused():
    """Every byte is under a CRC32C: no single flip goes unseen."""
    data = encode_rows(random_rows(20), group_rows=8)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(DamageError):
            decode_rows(bytes(damaged))


def test_decode_rows_of_any_cut_or_padding_is_refused():
    data = encode_rows(random_rows(20), group_rows=8)
    for size in range(len(data)):
        with pytest.raises(DamageError):
            decode_rows(data[:size])
    with pytest.raises(DamageError):
        decode_rows(data + b"\0")


@pytest.mark.parametrize(
    ("offset", "kind", "values"),
    [
        (0, "<I", [0, 2, 2**32 - 1]),
        (4, "<I", [0, 1, 2**31, 2**32 - 1]),
        (8, "<Q", [0, 1, 21, 2**40, 2**64 - 1]),
        (16, "<Q", [0, 1, 2**40, 2**64 - 1]),
        (24, "<I", [0, 1, 2**32 - 1]),
        (28, "<I", [0, 1, 2**32 - 1]),
        (32, "<I", [0, 2**32 - 1]),
        (36, "<I", [0, 3, 2**32 - 1]),
    ],
)
def test_decode_rows_with_an_adversarial_header_is_refused(offset, kind, values, memory_limit):
    """Even where the checksum holds: someone may have written it so."""
    data = encode_rows(random_rows(20), group_rows=8)
    for value in values:
        damaged = bytearray(data)
        struct.pack_into(kind, damaged, offset, value)
        if bytes(damaged) != data:
            with pytest.raises(DamageError):
                decode_rows(with_checksums_mended(bytes(damaged)), max_rows=100, max_entries=100_000)


def with_checksums_mended(data: bytes) -> bytes:
    """What an adversary would do."""
    if len(data) < HEADER_BYTES:
        return data
    front = int.from_bytes(data[4:8], "little") + HEADER_BYTES + 24 * int.from_bytes(data[24:28], "little")
    crc = row_stream.front_crc(memoryview(data)[: min(front, len(data))])
    return data[: HEADER_BYTES - 4] + struct.pack("<I", crc) + data[HEADER_BYTES:]


def test_decode_rows_refuses_more_than_asked_for():
    data = encode_rows(rows_of([[(1, 1, 0), (2, 1, 0)]] * 2))
    with pytest.raises(DamageError, match="at most 1 rows"):
        decode_rows(data, max_rows=1)
    with pytest.raises(DamageError, match="at most 3 entries"):
        decode_rows(data, max_entries=3)


def test_zarr_read_of_any_flipped_bit_is_refused():
    rows = random_rows(8)
    store, width = MemoryStore(), width_of(rows)
    array = zarr_array(store, rows.num_rows, width)
    data = encode_rows(rows)
    for position in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        store._store_dict[KEY] = cpu.Buffer.from_bytes(bytes(damaged))
        with pytest.raises((ValueError, DamageError)):
            array[...]


@pytest.mark.parametrize("num_rows", [7, 9])
def test_zarr_read_of_rows_of_another_shape_is_refused(num_rows):
    """Checksums hold, the codec's own check does not: metadata and bytes are of two arrays."""
    store = MemoryStore()
    array = zarr_array(store, 8, 2)
    store._store_dict[KEY] = cpu.Buffer.from_bytes(encode_rows(rows_of([[(1, 1, 0)]] * num_rows)))
    for wanted in (slice(None), slice(0, 1)):
        with pytest.raises(DamageError):
            array[wanted]
