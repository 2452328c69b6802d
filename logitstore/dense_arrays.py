"""Dense arrays from their stored bytes, without zarr's pipeline where the layout is the store's own.

Zarr spends about 70 us of CPU on every chunk; here it is a checksum and zstd straight into the array. What another
writer laid out otherwise goes through zarr.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from numcodecs.zstd import Zstd
from zarr.core.buffer import cpu
from zarr.storage import MemoryStore

from logitstore.codecs import QUANTISED
from logitstore.errors import DamageError
from logitstore.sharding import split_shard, without_crc, zstd_content_size

_CRC32C = {"name": "crc32c"}
_DTYPES = {"bool", "uint8", "int32", "int64", "uint64", "float32"}


def decode_dense(metadata: Mapping[str, Any], objects: Mapping[str, bytes | memoryview]) -> np.ndarray:
    """All values of an array; columns lie one after the other, as they are stored.

    Args:
        metadata: what its ``zarr.json`` says.
        objects: its stored bytes by key, such as ``c/0/0``.

    Raises:
        DamageError: they cannot be decoded.
    """
    if (first := metadata["codecs"][0] if metadata.get("codecs") else {}).get("name") == QUANTISED:
        return _decode_quantised(metadata, first, objects)
    layout = _Layout.of(metadata)
    if layout is not None and len(objects) == 1:
        chunks = split_shard(next(iter(objects.values())), layout.num_chunks)
        if all(chunk is not None for chunk in chunks):
            return layout.decode([chunk for chunk in chunks if chunk is not None])
    return _decode_by_zarr(metadata, objects)


def _decode_quantised(
    metadata: Mapping[str, Any], codec: Mapping[str, Any], objects: Mapping[str, bytes | memoryview]
) -> np.ndarray:
    from logitstore.codecs import quantised

    try:
        steps, (num_rows, num_columns) = quantised.steps_of(codec.get("configuration")), metadata["shape"]
    except (LookupError, TypeError, ValueError) as error:
        raise DamageError(f"its metadata is not that of such an array: {error}") from error
    if num_rows == 0:
        return np.empty((0, num_columns), np.float32)
    return quantised.decode_columns(objects["c/0/0"], steps, num_rows)


@dataclass(frozen=True)
class _Layout:
    """One shard whose inner chunks are runs of ``chunk_rows`` values of one column: zstd, then CRC32C."""

    dtype: np.dtype
    shape: tuple[int, ...]
    chunk_rows: int

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> _Layout | None:
        """The layout that ``metadata`` describes, or None if it is another."""
        try:
            shape, dtype = tuple(metadata["shape"]), metadata["data_type"]
            shard_shape = metadata["chunk_grid"]["configuration"]["chunk_shape"]
            (sharding,) = metadata["codecs"]
            chunk_rows, *chunk_columns = sharding["configuration"]["chunk_shape"]
            is_ours = (
                dtype in _DTYPES
                and 1 <= len(shape) <= 2
                and chunk_columns == [1] * (len(shape) - 1)
                and shard_shape == [max(1, -(-shape[0] // chunk_rows)) * chunk_rows, *shape[1:]]
                and _codecs_are_ours(sharding)
                and not metadata.get("storage_transformers")
            )
        except (LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError):
            return None
        return cls(np.dtype(dtype).newbyteorder("<"), shape, chunk_rows) if is_ours else None

    @property
    def num_columns(self) -> int:
        return self.shape[1] if len(self.shape) == 2 else 1

    @property
    def num_chunks(self) -> int:
        return max(1, -(-self.shape[0] // self.chunk_rows)) * self.num_columns

    def decode(self, chunks: list[memoryview]) -> np.ndarray:
        columns = np.empty((self.num_columns, self.shape[0]), self.dtype)
        for number, chunk in enumerate(chunks):
            row, column = divmod(number, self.num_columns)
            target = columns[column, row * self.chunk_rows : (row + 1) * self.chunk_rows]
            if len(target) == self.chunk_rows:
                self._decode_chunk(chunk, target, f"chunk {number}")
            else:  # the last one is filled up
                whole = np.empty(self.chunk_rows, self.dtype)
                self._decode_chunk(chunk, whole, f"chunk {number}")
                target[:] = whole[: len(target)]
        return columns.T.reshape(self.shape) if len(self.shape) == 2 else columns[0]

    def _decode_chunk(self, chunk: memoryview, target: np.ndarray, what: str) -> None:
        frame = without_crc(chunk, what)
        if (declared := zstd_content_size(frame)) != target.nbytes:
            raise DamageError(f"{what}: {target.nbytes} bytes were expected, {declared} are declared")
        try:
            Zstd().decode(frame, target)
        except (RuntimeError, ValueError) as error:
            raise DamageError(f"{what}: {error}") from error


def _codecs_are_ours(sharding: Mapping[str, Any]) -> bool:
    configuration = sharding["configuration"]
    to_bytes, zstd, checksum = configuration["codecs"]
    index_to_bytes, index_checksum = configuration["index_codecs"]
    return (
        sharding["name"] == "sharding_indexed"
        and configuration.get("index_location", "end") == "end"
        and all(_is_little_endian(codec) for codec in (to_bytes, index_to_bytes))
        and zstd["name"] == "zstd"
        and checksum == index_checksum == _CRC32C
    )


def _is_little_endian(codec: Mapping[str, Any]) -> bool:
    return codec["name"] == "bytes" and codec.get("configuration", {}).get("endian", "little") == "little"


def _decode_by_zarr(metadata: Mapping[str, Any], objects: Mapping[str, bytes | memoryview]) -> np.ndarray:
    named = {"zarr.json": json.dumps(metadata).encode(), **objects}
    store = MemoryStore({f"array/{key}": cpu.Buffer.from_bytes(data) for key, data in named.items()})
    try:
        return np.asarray(zarr.open_array(store, path="array", mode="r")[...])
    except (ValueError, RuntimeError, LookupError, OSError, TypeError) as error:
        raise DamageError(f"cannot decode ({error})") from error
