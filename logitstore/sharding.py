"""Zarr's ``sharding_indexed`` layout: a shard is its inner chunks, then an index of (offset, size), then a CRC32C.

Each inner chunk ends with its own CRC32C.
https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html
"""

from __future__ import annotations

import struct

import numpy as np
from google_crc32c import value as crc32c

from logitstore.errors import DamageError

_CRC = struct.Struct("<I")
_NO_CHUNK = (1 << 64) - 1


def split_shard(shard: bytes | memoryview, num_chunks: int) -> list[memoryview | None]:
    """Each inner chunk as it is encoded, its checksum included; None for one that is left out, being all fill.

    Raises:
        DamageError: the index's checksum does not hold, or it points outside the shard.
    """
    view, index_bytes = memoryview(shard), 16 * num_chunks + _CRC.size
    data_bytes = len(view) - index_bytes
    if data_bytes < 0:
        raise DamageError(f"a shard of {num_chunks} chunks has at least {index_bytes} bytes, found {len(view)}")
    index = np.frombuffer(without_crc(view[data_bytes:], "shard index"), "<u8").reshape(num_chunks, 2).tolist()
    for number, (offset, size) in enumerate(index):
        if not offset == size == _NO_CHUNK and offset + size > data_bytes:
            raise DamageError(f"chunk {number}: ends at byte {offset + size}, past the shard's data")
    return [None if offset == size == _NO_CHUNK else view[offset : offset + size] for offset, size in index]


def with_crc(data: bytes) -> bytes:
    return data + _CRC.pack(crc32c(data))


def crc32c_of(data: memoryview) -> int:
    """The checksum of a buffer where it lies: the library takes no memoryview, but arrays, and copies neither."""
    return crc32c(np.asarray(data))


def without_crc(data: memoryview, what: str) -> memoryview:
    """``data`` less the checksum at its end.

    Raises:
        DamageError: the checksum does not hold.
    """
    if len(data) < _CRC.size:
        raise DamageError(f"{what}: too short for a checksum")
    body = data[: -_CRC.size]
    (stored,) = _CRC.unpack(data[-_CRC.size :])
    if stored != (computed := crc32c_of(body)):
        raise DamageError(f"{what}: CRC32C {stored:08x} is stored, {computed:08x} computed")
    return body


def zstd_content_size(frame: bytes | memoryview) -> int | None:
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
