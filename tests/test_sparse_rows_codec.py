"""The codec of sparse rows and its shards: lossless, as zarr writes and reads them, never fooled by damaged bytes."""

from __future__ import annotations

import itertools
import json
import struct
import tracemalloc

import numpy as np
import pytest
import zarr
from google_crc32c import value as crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs.zstd import Zstd
from sparse_strategies import assert_equal_rows, random_rows, rows_of, sparse_rows
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.core.buffer import cpu
from zarr.storage import MemoryStore

from logitstore.codecs.shard import decode_sparse_shard, encode_sparse_shard
from logitstore.codecs.sparse_rows import CODEC_NAME, SparseRowsCodec, decode_rows, encode_rows, max_encoded_size
from logitstore.errors import DamageError
from logitstore.sparse import FILL, SparseRows

CHUNK_ROWS = 8
SHARD_KEY = "sparse/c/0/0"


def zarr_array(store: MemoryStore, num_rows: int, width: int, **options) -> zarr.Array:
    """An empty array as parts lay it out, on a small scale."""
    return zarr.create_array(
        store,
        name="sparse",
        shape=(num_rows, width),
        dtype="uint64",
        chunks=(CHUNK_ROWS, width),
        shards=(max(1, -(-num_rows // CHUNK_ROWS)) * CHUNK_ROWS, width),
        serializer=SparseRowsCodec(),
        compressors=[ZstdCodec(level=1), Crc32cCodec()],
        fill_value=int(FILL),
        **options,
    )


def width_of(rows: SparseRows) -> int:
    return max(1, int(rows.counts.max(initial=0)))


# The codec itself


@given(sparse_rows())
def test_rows_round_trip(rows):
    encoded = encode_rows(rows)
    assert len(encoded) <= max_encoded_size(rows.num_rows, width_of(rows))
    assert_equal_rows(decode_rows(encoded), rows)


def test_encode_rows_is_pinned():
    """Byte for byte what the docstring of the module says: released stores are made of it."""
    rows = rows_of([[(0x0102, 3, 1), (4, 9, 0), (5, 0x10A, 0x102)], [], [(7, 0xFFFE, 0)]])
    assert encode_rows(rows) == (
        struct.pack("<4I", 1, 3, 4, 2)
        + bytes([3, 0, 1]) + bytes([0, 0, 0])
        + bytes([2, 4, 5, 7]) + bytes([1, 0, 0, 0])
        + bytes([3, 9, 1, 0xFE]) + bytes([0, 0, 1, 0xFF])
        + bytes([1, 0, 2, 0]) + bytes([0, 0, 1, 0])
    )  # fmt: skip


def test_encode_rows_with_more_entries_than_counts_can_tell_is_refused():
    too_long = rows_of([[(1, 1, False)] * 0x10000])
    with pytest.raises(ValueError, match="65535 entries"):
        encode_rows(too_long)
    assert_equal_rows(decode_rows(encode_rows(too_long.slice_rows(0, 0))), too_long.slice_rows(0, 0))


def test_encode_rows_with_a_negative_id_is_refused():
    with pytest.raises(ValueError, match="ids from 0"):
        encode_rows(rows_of([[(-1, 1, False)]]))


# Through zarr


@settings(max_examples=25)
@given(sparse_rows(max_rows=30))
def test_zarr_reads_what_our_shard_writer_writes(rows):
    store, width = MemoryStore(), width_of(rows)
    zarr_array(store, rows.num_rows, width)
    store._store_dict[SHARD_KEY] = cpu.Buffer.from_bytes(encode_sparse_shard(rows, CHUNK_ROWS, 1))
    assert (zarr.open_group(store, mode="r")["sparse"][...] == rows.rectangle(width)).all()


@settings(max_examples=25)
@given(sparse_rows(max_rows=30), st.booleans())
def test_our_shard_reader_reads_what_zarr_writes(rows, write_empty_chunks):
    store, width = MemoryStore(), width_of(rows)
    array = zarr_array(store, rows.num_rows, width, config={"write_empty_chunks": write_empty_chunks})
    array[...] = rows.rectangle(width)
    if SHARD_KEY in store._store_dict:  # zarr leaves out a shard of nothing but fill
        shard = store._store_dict[SHARD_KEY].to_bytes()
        assert_equal_rows(decode_sparse_shard(shard, rows.num_rows, CHUNK_ROWS, width), rows)
    else:
        assert rows.num_entries == 0


def test_our_shard_is_zarrs_byte_for_byte():
    rows = random_rows(5 * CHUNK_ROWS + 3)
    store, width = MemoryStore(), width_of(rows)
    zarr_array(store, rows.num_rows, width, config={"write_empty_chunks": True})[...] = rows.rectangle(width)
    ours = encode_sparse_shard(rows, CHUNK_ROWS, 1)
    theirs = store._store_dict[SHARD_KEY].to_bytes()
    # zarr may lay inner chunks in another order; the chunks themselves and their number are the same bytes.
    assert len(ours) == len(theirs)
    assert sorted(chunks_of(ours, 6)) == sorted(chunks_of(theirs, 6))


def chunks_of(shard: bytes, num_chunks: int) -> list[bytes]:
    index = np.frombuffer(shard[-16 * num_chunks - 4 : -4], "<u8").reshape(-1, 2)
    return [shard[offset : offset + size] for offset, size in index.tolist()]


@pytest.mark.parametrize("num_rows", [0, 1, CHUNK_ROWS, CHUNK_ROWS + 1, 3 * CHUNK_ROWS])
def test_shard_round_trip_at_the_edges_of_chunks(num_rows):
    rows = random_rows(num_rows)
    shard = encode_sparse_shard(rows, CHUNK_ROWS, 3)
    assert_equal_rows(decode_sparse_shard(shard, num_rows, CHUNK_ROWS, width_of(rows)), rows)


def test_zarr_reads_parts_of_a_shard(tmp_path):
    """Plain ``zarr.open_group`` on a folder, with nothing of ours imported by the reader but the registered codec."""
    rows = random_rows(10 * CHUNK_ROWS)
    width = width_of(rows)
    table = rows.rectangle(width)
    group = zarr.open_group(str(tmp_path / "part"), mode="w")
    zarr_array(group.store, rows.num_rows, width)[...] = table
    read = zarr.open_group(str(tmp_path / "part"), mode="r")["sparse"]
    for rows_wanted, columns in itertools.product(
        [slice(0, 1), slice(7, 9), slice(30, 61, 3), slice(None), 79], [slice(None), slice(1, 3), 0]
    ):
        assert np.array_equal(read[rows_wanted, columns], table[rows_wanted, columns])
    metadata = json.loads((tmp_path / "part/sparse/zarr.json").read_text())
    assert {"name": CODEC_NAME} in metadata["codecs"][0]["configuration"]["codecs"]


def test_zarr_updates_part_of_a_shard():
    rows = random_rows(4 * CHUNK_ROWS)
    width, store = width_of(rows), MemoryStore()
    array = zarr_array(store, rows.num_rows, width)
    table = rows.rectangle(width)
    array[...] = table
    array[5:20] = table[5:20] = FILL
    assert (array[...] == table).all()


@pytest.mark.parametrize(("shape", "dtype"), [((4, 2), "int32"), ((8,), "uint64"), ((2, 2, 2), "uint64")])
def test_codec_for_other_arrays_is_refused(shape, dtype):
    with pytest.raises(ValueError, match="uint64"):
        zarr.create_array(MemoryStore(), shape=shape, dtype=dtype, serializer=SparseRowsCodec(), fill_value=0)


def test_zarr_write_of_entries_right_of_fill_is_refused():
    array = zarr_array(MemoryStore(), CHUNK_ROWS, 2)
    with pytest.raises(ValueError, match="right of fill"):
        array[...] = np.tile(np.array([FILL, 1], np.uint64), (CHUNK_ROWS, 1))


def test_codec_in_metadata_reads_back():
    assert SparseRowsCodec.from_dict({"name": CODEC_NAME}) == SparseRowsCodec()
    assert SparseRowsCodec().to_dict() == {"name": CODEC_NAME}
    with pytest.raises(NotImplementedError):
        SparseRowsCodec().compute_encoded_size(100, None)


# Damage


def mutations(data: bytes, count: int, seed: int):
    """Copies of ``data`` with bits flipped, bytes overwritten, ends cut off, stretches doubled or dropped."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        damaged = bytearray(data)
        kind = rng.integers(5)
        begin, end = sorted(rng.integers(0, len(data) + 1, 2).tolist())
        if kind == 0:
            for position in rng.integers(0, len(data), rng.integers(1, 4)):
                damaged[position] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            damaged[begin : begin + 4] = rng.integers(0, 256, 4, np.uint8).tobytes()
        elif kind == 2:
            del damaged[begin:]
        elif kind == 3:
            del damaged[begin:end]
        else:
            damaged[end:end] = damaged[begin:end]
        yield bytes(damaged)


@pytest.fixture
def memory_limit():
    """Fails if a test ever held more than 16 MiB: adversarial sizes must be refused before they are allocated."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


def test_decode_rows_of_mutated_bytes_is_refused_or_consistent(memory_limit):
    """No checksum here: other values may come out, but only ones of that form."""
    encoded = encode_rows(random_rows(60))
    for damaged in mutations(encoded, 3000, seed=1):
        try:
            rows = decode_rows(damaged)
        except DamageError:
            continue
        assert len(rows.ids) == len(rows.quanta) == len(rows.draws) == rows.offsets[-1]
        assert rows.ids.min(initial=0) >= 0
        assert_equal_rows(SparseRows.from_rectangle(rows.rectangle(width_of(rows))), rows)


@pytest.mark.parametrize(
    ("field", "value"), sorted(set(itertools.product(range(4), [0, 1, 5, 2**31, 2**32 - 1])) - {(0, 1)})
)
def test_decode_rows_with_an_adversarial_header_is_refused(field, value, memory_limit):
    encoded = bytearray(encode_rows(random_rows(20)))
    struct.pack_into("<I", encoded, 4 * field, value)
    with pytest.raises(DamageError):
        decode_rows(bytes(encoded))


def test_decode_rows_refuses_more_entries_than_asked_for():
    with pytest.raises(DamageError, match="at most 1 entries"):
        decode_rows(encode_rows(rows_of([[(1, 1, False)] * 2])), max_entries=1)


def test_decode_shard_of_any_flipped_bit_is_refused():
    """Every byte of a shard is under a CRC32C: no single flip goes unseen."""
    rows = random_rows(2 * CHUNK_ROWS)
    shard, width = encode_sparse_shard(rows, CHUNK_ROWS, 1), width_of(rows)
    for position in range(len(shard)):
        damaged = bytearray(shard)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(DamageError):
            decode_sparse_shard(bytes(damaged), rows.num_rows, CHUNK_ROWS, width)


def test_decode_shard_of_mutated_bytes_is_refused(memory_limit):
    rows = random_rows(4 * CHUNK_ROWS, seed=2)
    shard, width = encode_sparse_shard(rows, CHUNK_ROWS, 1), width_of(rows)
    for damaged in mutations(shard, 2000, seed=3):
        try:
            found = decode_sparse_shard(damaged, rows.num_rows, CHUNK_ROWS, width)
        except DamageError:
            continue
        assert_equal_rows(found, rows)  # bytes before the index that no chunk is made of


def shard_of(chunk: bytes, index: tuple[int, int] | None = None) -> bytes:
    """A shard of one chunk with checksums that hold, whatever the chunk is."""
    checked = chunk + struct.pack("<I", crc32c(chunk))
    table = struct.pack("<2Q", *(index or (0, len(checked))))
    return checked + table + struct.pack("<I", crc32c(table))


def zstd_frame(declared: int, body: bytes = b"\x01\x00\x00") -> bytes:
    """A zstd frame that declares ``declared`` bytes and holds none."""
    return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", declared) + body


@pytest.mark.parametrize(
    "shard",
    [
        shard_of(zstd_frame(1 << 62)),
        shard_of(zstd_frame(1 << 40)),
        shard_of(zstd_frame(100)),
        shard_of(b"\x28\xb5\x2f\xfd\x00\x40\x01\x00\x00"),
        shard_of(b""),
        shard_of(b"not zstd at all"),
        shard_of(bytes(Zstd().encode(bytes(1 << 24)))),
        shard_of(bytes(Zstd().encode(encode_rows(random_rows(CHUNK_ROWS + 1))))),
        shard_of(bytes(Zstd().encode(encode_rows(rows_of([[(1, 1, False)] * 9] * CHUNK_ROWS))))),
        shard_of(b"abc", (0, (1 << 64) - 1)),
        shard_of(b"abc", ((1 << 64) - 1, 1)),
        shard_of(b"abc", (1 << 63, 1 << 63)),
        shard_of(b"abc", (0, 3)),
        shard_of(b"abc", (0, 100)),
        b"",
        b"short",
    ],
    ids=str,
)
def test_decode_shard_with_checksums_that_hold_over_nonsense_is_refused(shard, memory_limit):
    with pytest.raises(DamageError):
        decode_sparse_shard(shard, CHUNK_ROWS, CHUNK_ROWS, width=8)


def test_decode_shard_with_more_rows_declared_than_there_are_is_refused(memory_limit):
    shard = encode_sparse_shard(random_rows(CHUNK_ROWS), CHUNK_ROWS, 1)
    for num_rows in (CHUNK_ROWS + 1, 1 << 40):
        with pytest.raises(DamageError):
            decode_sparse_shard(shard, num_rows, CHUNK_ROWS, width=16)


def test_zarr_read_of_any_flipped_bit_is_refused():
    rows = random_rows(CHUNK_ROWS)
    store, width = MemoryStore(), width_of(rows)
    array = zarr_array(store, rows.num_rows, width)
    shard = encode_sparse_shard(rows, CHUNK_ROWS, 1)
    for position in range(len(shard)):
        damaged = bytearray(shard)
        damaged[position] ^= 1 << (position % 8)
        store._store_dict[SHARD_KEY] = cpu.Buffer.from_bytes(bytes(damaged))
        with pytest.raises((ValueError, DamageError)):
            array[...]


def test_zarr_read_of_rows_of_another_shape_is_refused():
    """Checksums hold, the codec's own check does not: metadata and shard are of two arrays."""
    store = MemoryStore()
    array = zarr_array(store, CHUNK_ROWS, 2)
    for rows in (random_rows(CHUNK_ROWS, mean_entries=20), random_rows(CHUNK_ROWS - 1, mean_entries=1)):
        shard = shard_of(bytes(Zstd().encode(encode_rows(rows))))
        store._store_dict[SHARD_KEY] = cpu.Buffer.from_bytes(shard)
        with pytest.raises(DamageError):
            array[...]
