"""Zarr's ``sharding_indexed`` layout for sparse arrays, written and read without the rectangle in between.

A shard is its inner chunks, then an index of (offset, size) pairs as little-endian uint64, then the index's CRC32C.
Each inner chunk is ``sparse_rows`` -> zstd -> CRC32C; the last one is filled up with empty rows, as zarr does.
https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html
"""

from __future__ import annotations

import struct

import numpy as np
from google_crc32c import value as crc32c
from numcodecs.zstd import Zstd

from logitstore.codecs.sparse_rows import decode_rows, encode_rows, max_encoded_size
from logitstore.errors import DamageError
from logitstore.sparse import SparseRows, offsets_of

_CRC = struct.Struct("<I")
_NO_CHUNK = (1 << 64) - 1


def encode_sparse_shard(rows: SparseRows, chunk_rows: int, zstd_level: int) -> bytes:
    """One shard with all of ``rows``, ``chunk_rows`` to an inner chunk."""
    zstd, chunks, index, position = Zstd(level=zstd_level), [], [], 0
    for begin in range(0, max(1, rows.num_rows), chunk_rows):
        chunk = rows.slice_rows(begin, min(begin + chunk_rows, rows.num_rows))
        encoded = _with_crc(bytes(zstd.encode(encode_rows(_fill_up(chunk, chunk_rows)))))
        chunks.append(encoded)
        index += [position, len(encoded)]
        position += len(encoded)
    return b"".join([*chunks, _with_crc(np.array(index, "<u8").tobytes())])


def decode_sparse_shard(shard: bytes, num_rows: int, chunk_rows: int, width: int) -> SparseRows:
    """All rows of a shard.

    Args:
        shard: its bytes.
        num_rows: of the array.
        chunk_rows: rows of an inner chunk.
        width: of the array: no row has more entries, which bounds what damaged bytes can make us allocate.

    Raises:
        DamageError: a checksum does not hold, or the bytes are not such a shard.
    """
    num_chunks = max(1, -(-num_rows // chunk_rows))
    index_bytes = 16 * num_chunks + _CRC.size
    if len(shard) < index_bytes:
        raise DamageError(f"a shard of {num_chunks} chunks has at least {index_bytes} bytes, found {len(shard)}")
    view = memoryview(shard)
    index = np.frombuffer(_without_crc(view[-index_bytes:], "shard index"), "<u8").reshape(num_chunks, 2)
    zstd, parts = Zstd(), []
    for number, (offset, size) in enumerate(index.tolist()):
        wanted = min(chunk_rows, num_rows - number * chunk_rows)
        if offset == size == _NO_CHUNK:  # a writer may leave out chunks of nothing but fill
            parts.append(_empty_rows(wanted))
            continue
        if offset + size > len(shard) - index_bytes:
            raise DamageError(f"chunk {number}: ends at byte {offset + size}, past the shard's data")
        encoded = bytes(_without_crc(view[offset : offset + size], f"chunk {number}"))
        largest = max_encoded_size(chunk_rows, width)
        if (declared := _declared_size(encoded)) is None or declared > largest:
            raise DamageError(f"chunk {number}: at most {largest} bytes were expected, {declared} are declared")
        try:
            decoded = zstd.decode(encoded)
        except RuntimeError as error:
            raise DamageError(f"chunk {number}: {error}") from error
        rows = decode_rows(decoded)
        if rows.num_rows != chunk_rows or rows.counts.max(initial=0) > width:
            shape = rows.num_rows, rows.counts.max(initial=0)
            raise DamageError(f"chunk {number}: a shape of {(chunk_rows, width)} was expected, found {shape}")
        parts.append(rows.slice_rows(0, wanted))
    return SparseRows.concatenate(parts)


def _declared_size(frame: bytes) -> int | None:
    """Decoded bytes that the header of a zstd frame declares (RFC 8878, 3.1.1.1), or None."""
    if len(frame) < 5 or frame[:4] != b"\x28\xb5\x2f\xfd":
        return None
    single_segment = frame[4] >> 5 & 1
    size_bytes = (single_segment, 2, 4, 8)[frame[4] >> 6]
    begin = 5 + (1 - single_segment) + (0, 1, 2, 4)[frame[4] & 3]
    field = frame[begin : begin + size_bytes]
    if not field or len(field) < size_bytes:
        return None
    return int.from_bytes(field, "little") + (256 if size_bytes == 2 else 0)


def _empty_rows(num_rows: int) -> SparseRows:
    zeros = np.zeros(num_rows + 1, np.int64)
    return SparseRows(zeros, np.empty(0, np.int32), np.empty(0, np.uint16), np.empty(0, np.uint16))


def _fill_up(rows: SparseRows, num_rows: int) -> SparseRows:
    counts = np.zeros(num_rows, np.int64)
    counts[: rows.num_rows] = rows.counts
    return SparseRows(offsets_of(counts), rows.ids, rows.quanta, rows.draws, rows.step_nats)


def _with_crc(data: bytes) -> bytes:
    return data + _CRC.pack(crc32c(data))


def _without_crc(data: memoryview, what: str) -> memoryview:
    if len(data) < _CRC.size:
        raise DamageError(f"{what}: too short for a checksum")
    (stored,) = _CRC.unpack(data[-_CRC.size :])
    computed = crc32c(bytes(data[: -_CRC.size]))
    if stored != computed:
        raise DamageError(f"{what}: CRC32C {stored:08x} is stored, {computed:08x} computed")
    return data[: -_CRC.size]
