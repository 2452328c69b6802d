"""Zarr's ``sharding_indexed`` layout for sparse arrays, written and read without the rectangle in between.

A shard is its inner chunks, then an index of (offset, size) pairs as little-endian uint64, then the index's CRC32C.
Each inner chunk is ``sparse_rows`` -> zstd -> CRC32C; the last one is filled up with empty rows, as zarr does.
https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html
"""

from __future__ import annotations

import numpy as np
from numcodecs.zstd import Zstd

from logitstore.codecs.sparse_rows import decode_rows, encode_rows, max_encoded_size
from logitstore.errors import DamageError
from logitstore.sharding import split_shard, with_crc, without_crc, zstd_content_size
from logitstore.sparse import SparseRows, offsets_of


def encode_sparse_shard(rows: SparseRows, chunk_rows: int, zstd_level: int) -> bytes:
    """One shard with all of ``rows``, ``chunk_rows`` to an inner chunk."""
    zstd, chunks, index, position = Zstd(level=zstd_level), [], [], 0
    for begin in range(0, max(1, rows.num_rows), chunk_rows):
        chunk = rows.slice_rows(begin, min(begin + chunk_rows, rows.num_rows))
        encoded = with_crc(bytes(zstd.encode(encode_rows(_fill_up(chunk, chunk_rows)))))
        chunks.append(encoded)
        index += [position, len(encoded)]
        position += len(encoded)
    return b"".join([*chunks, with_crc(np.array(index, "<u8").tobytes())])


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
    zstd, parts = Zstd(), []
    for number, chunk in enumerate(split_shard(shard, max(1, -(-num_rows // chunk_rows)))):
        wanted = min(chunk_rows, num_rows - number * chunk_rows)
        if chunk is None:
            parts.append(_empty_rows(wanted))
            continue
        encoded = without_crc(chunk, f"chunk {number}")
        largest = max_encoded_size(chunk_rows, width)
        if (declared := zstd_content_size(encoded)) is None or declared > largest:
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


def _empty_rows(num_rows: int) -> SparseRows:
    zeros = np.zeros(num_rows + 1, np.int64)
    return SparseRows(zeros, np.empty(0, np.int32), np.empty(0, np.uint16), np.empty(0, np.uint16))


def _fill_up(rows: SparseRows, num_rows: int) -> SparseRows:
    counts = np.zeros(num_rows, np.int64)
    counts[: rows.num_rows] = rows.counts
    return SparseRows(offsets_of(counts), rows.ids, rows.quanta, rows.draws, rows.step_nats)
