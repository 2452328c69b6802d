"""Zarr v3 codec ``logitstore.sparse_rows``: a rectangle of sparse entries to ragged byte planes.

It drops the fill and lays like bytes next to like, so that a general compressor after it (zstd) finds them:

    uint32 version, num_rows, num_entries, id_bytes          little-endian
    counts    2 planes of num_rows bytes                     low bytes, then high bytes
    ids       id_bytes planes of num_entries bytes
    quanta    2 planes of num_entries bytes, as differences from the left neighbour, modulo 2^16;
              columns 0 and 1 are kept as they are (the realised token's has no order with the rest)
    draws     2 planes of num_entries bytes

Lossless for any rectangle that is filled from the left. ``encode_rows`` and ``decode_rows`` serve those who have or
want ragged rows; the codec class wraps them for zarr.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from zarr.abc.codec import ArrayBytesCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, NDBuffer
from zarr.core.common import JSON, parse_named_configuration

from logitstore.errors import DamageError
from logitstore.sparse import SparseRows, offsets_of

CODEC_NAME = "logitstore.sparse_rows"
VERSION = 1
MAX_ROW_ENTRIES = 0xFFFF
_HEADER = struct.Struct("<4I")


def encode_rows(rows: SparseRows) -> bytes:
    """Ragged rows to bytes.

    Raises:
        ValueError: a row has more than 65535 entries, or an id is negative.
    """
    if rows.counts.max(initial=0) > MAX_ROW_ENTRIES or rows.ids.min(initial=0) < 0:
        longest, smallest = rows.counts.max(initial=0), rows.ids.min(initial=0)
        raise ValueError(
            f"sparse rows hold up to {MAX_ROW_ENTRIES} entries a row and ids from 0, found {longest} and {smallest}"
        )
    id_bytes = max(1, (int(rows.ids.max(initial=0)).bit_length() + 7) // 8)
    header = _HEADER.pack(VERSION, rows.num_rows, rows.num_entries, id_bytes)
    deltas = rows.quanta.copy()
    followers = _has_left_neighbour(rows.offsets)
    deltas[followers] -= rows.quanta[np.flatnonzero(followers) - 1]
    planes = [
        _split_planes(rows.counts.astype("<u2"), 2),
        _split_planes(rows.ids.astype("<u4"), id_bytes),
        _split_planes(deltas.astype("<u2"), 2),
        _split_planes(rows.draws.astype("<u2"), 2),
    ]
    return header + b"".join(plane.tobytes() for plane in planes)


def max_encoded_size(num_rows: int, width: int) -> int:
    """Most bytes that ``encode_rows`` makes of ``num_rows`` rows of up to ``width`` entries."""
    return _HEADER.size + 2 * num_rows + num_rows * width * (4 + 2 + 2)


def decode_rows(data: bytes | memoryview | np.ndarray, max_entries: int | None = None) -> SparseRows:
    """The inverse of ``encode_rows``.

    Args:
        data: what ``encode_rows`` returned.
        max_entries: refuse to allocate for more entries than this.

    Raises:
        DamageError: ``data`` is not of that form.
    """
    bytes_ = np.frombuffer(data, np.uint8)
    if len(bytes_) < _HEADER.size:
        raise DamageError(f"sparse rows: a header of {_HEADER.size} bytes was expected, found {len(bytes_)}")
    version, num_rows, num_entries, id_bytes = _HEADER.unpack(bytes_[: _HEADER.size].tobytes())
    if version != VERSION or not 1 <= id_bytes <= 4:
        raise DamageError(f"sparse rows: version {VERSION} was expected, found {version} with {id_bytes}-byte ids")
    sizes = [2 * num_rows, id_bytes * num_entries, 2 * num_entries, 2 * num_entries]
    if sum(sizes) != len(bytes_) - _HEADER.size:
        raise DamageError(f"sparse rows: {sum(sizes)} bytes were declared, found {len(bytes_) - _HEADER.size}")
    if max_entries is not None and num_entries > max_entries:
        raise DamageError(f"sparse rows: at most {max_entries} entries fit the array, {num_entries} are declared")
    counts_part, ids_part, quanta_part, draws_part = np.split(bytes_[_HEADER.size :], np.cumsum(sizes)[:-1])
    counts = _join_planes(counts_part, 2, num_rows).astype(np.int64)
    if counts.sum() != num_entries:
        raise DamageError(f"sparse rows: counts add up to {counts.sum()}, {num_entries} entries are declared")
    ids = _join_planes(ids_part, id_bytes, num_entries)
    if ids.max(initial=0) >> 31:
        raise DamageError(f"sparse rows: token ids are below 2^31, found {ids.max()}")
    offsets = offsets_of(counts)
    return SparseRows(
        offsets,
        ids.astype(np.int32),
        _undo_deltas(_join_planes(quanta_part, 2, num_entries), offsets),
        _join_planes(draws_part, 2, num_entries),
    )


def _undo_deltas(deltas: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    # A running sum over everything, less its value where each run began; all of it modulo 2^16.
    sums = np.cumsum(deltas, dtype=np.uint16)
    starts = np.flatnonzero(~_has_left_neighbour(offsets))
    lengths = np.diff(np.append(starts, len(deltas)))
    return sums - np.repeat(sums[starts] - deltas[starts], lengths)


def _has_left_neighbour(offsets: np.ndarray) -> np.ndarray:
    """bool [E]: entries in column 2 or further right, which are stored as differences."""
    followers = np.ones(offsets[-1], dtype=bool)
    counts = np.diff(offsets)
    followers[offsets[:-1][counts > 0]] = False
    followers[offsets[:-1][counts > 1] + 1] = False
    return followers


def _split_planes(values: np.ndarray, num_planes: int) -> np.ndarray:
    return np.ascontiguousarray(values.view(np.uint8).reshape(len(values), values.itemsize)[:, :num_planes].T)


def _join_planes(planes: np.ndarray, num_planes: int, length: int) -> np.ndarray:
    values = np.zeros((length, 2 if num_planes <= 2 else 4), dtype=np.uint8)
    values[:, :num_planes] = planes.reshape(num_planes, length).T
    return values.reshape(-1).view("<u2" if num_planes <= 2 else "<u4")


@dataclass(frozen=True)
class SparseRowsCodec(ArrayBytesCodec):
    """The array -> bytes codec of ``sparse`` arrays (uint64 [T, K])."""

    is_fixed_size = False

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        parse_named_configuration(data, CODEC_NAME, require_configuration=False)
        return cls()

    def to_dict(self) -> dict[str, JSON]:
        return {"name": CODEC_NAME}

    def validate(self, *, shape: tuple[int, ...], dtype: Any, chunk_grid: Any) -> None:
        if len(shape) != 2 or dtype.to_native_dtype() != np.uint64:
            raise ValueError(f"{CODEC_NAME} takes uint64 [T, K] arrays, found {dtype} with {len(shape)} dimensions")

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        raise NotImplementedError(f"{CODEC_NAME}: the encoded size depends on the values")

    def _encode_sync(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> Buffer:
        rows = SparseRows.from_rectangle(chunk_array.as_numpy_array())
        return chunk_spec.prototype.buffer.from_bytes(encode_rows(rows))

    def _decode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        num_rows, width = chunk_spec.shape
        rows = decode_rows(chunk_bytes.to_bytes(), max_entries=num_rows * width)
        if rows.num_rows != num_rows or rows.counts.max(initial=0) > width:
            raise DamageError(f"sparse rows: a chunk of shape {chunk_spec.shape} was expected, found other rows")
        return chunk_spec.prototype.nd_buffer.from_numpy_array(rows.rectangle(width))

    async def _encode_single(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> Buffer:
        return self._encode_sync(chunk_array, chunk_spec)

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        return self._decode_sync(chunk_bytes, chunk_spec)
