"""Zarr v3 codec ``logitstore.sparse_rows``: a rectangle of sparse entries as a stream of ``row_stream``.

A chunk carries the model of its rows, so chunks are meant to be large: logitstore makes an array one chunk, and a
reader of some rows fetches the front of the chunk and the groups that hold them. It works inside ``sharding_indexed``
too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from zarr.abc.codec import ArrayBytesCodec, ArrayBytesCodecPartialDecodeMixin
from zarr.abc.store import ByteGetter, RangeByteRequest
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, NDBuffer
from zarr.core.common import JSON, parse_named_configuration
from zarr.registry import register_codec

from logitstore.codecs import SPARSE_ROWS
from logitstore.codecs.row_encoder import encode_rows
from logitstore.codecs.row_stream import HEADER_BYTES, Header, RowReader, decode_rows
from logitstore.errors import DamageError
from logitstore.sparse import SparseRows

CODEC_NAME = SPARSE_ROWS
_FRONT_BYTES = 1 << 16
"""What is fetched of a chunk at first: header and index, and of a small chunk all."""


def decode_chunk(data: bytes | memoryview, num_rows: int, width: int) -> SparseRows:
    """Rows of a chunk of shape ``(num_rows, width)``.

    Raises:
        DamageError: the bytes are not those of such a chunk.
    """
    rows = decode_rows(data, max_rows=num_rows, max_entries=num_rows * width)
    _check_shape(rows.num_rows, int(rows.counts.max(initial=0)), num_rows, width)
    return rows


def _check_shape(found_rows: int, found_width: int, num_rows: int, width: int) -> None:
    if found_rows != num_rows or found_width > width:
        raise DamageError(
            f"sparse rows: a chunk of shape {(num_rows, width)} was expected, found {(found_rows, found_width)}"
        )


@dataclass(frozen=True)
class SparseRowsCodec(ArrayBytesCodec, ArrayBytesCodecPartialDecodeMixin):
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
        rows = decode_chunk(chunk_bytes.to_bytes(), num_rows, width)
        return chunk_spec.prototype.nd_buffer.from_numpy_array(rows.rectangle(width))

    async def _encode_single(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> Buffer:
        return self._encode_sync(chunk_array, chunk_spec)

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        return self._decode_sync(chunk_bytes, chunk_spec)

    async def _decode_partial_single(
        self, byte_getter: ByteGetter, selection: Any, chunk_spec: ArraySpec
    ) -> NDBuffer | None:
        """Only the groups that hold the rows of ``selection`` are fetched."""
        prototype, (num_rows, width) = chunk_spec.prototype, chunk_spec.shape
        front = await byte_getter.get(prototype, RangeByteRequest(0, _FRONT_BYTES))
        if front is None:
            return None
        data = front.to_bytes()
        missing = Header.parse(data[:HEADER_BYTES]).front_bytes - len(data)
        if missing > 0:
            more = await byte_getter.get(prototype, RangeByteRequest(len(data), len(data) + missing))
            data += more.to_bytes() if more is not None else b""
        reader = RowReader(data, num_rows, num_rows * width)
        _check_shape(reader.header.num_rows, reader.header.width, num_rows, width)
        rows, *columns = selection if isinstance(selection, tuple) else (selection,)
        first, last = _groups_of(rows, num_rows, reader.header.group_rows)
        words = await byte_getter.get(prototype, RangeByteRequest(*reader.group_bytes(first, last)))
        table = reader.read(words.to_bytes() if words is not None else b"", first, last).rectangle(width)
        kept = table[(_moved(rows, num_rows, first * reader.header.group_rows), *columns)]
        return prototype.nd_buffer.from_numpy_array(np.ascontiguousarray(kept))


def _groups_of(rows: Any, num_rows: int, group_rows: int) -> tuple[int, int]:
    """First and last (not included) group of those that hold the selected rows."""
    picked = np.arange(num_rows)[rows]
    if picked.size == 0:
        return 0, 1
    return int(picked.min()) // group_rows, int(picked.max()) // group_rows + 1


def _moved(rows: Any, num_rows: int, by: int) -> Any:
    """The same selection where row ``by`` is the first."""
    if not isinstance(rows, slice):
        return np.asarray(np.arange(num_rows)[rows]) - by
    begin, stop, step = rows.indices(num_rows)
    return slice(begin - by, stop - by, step)


register_codec(CODEC_NAME, SparseRowsCodec)  # where the entry point is not installed
