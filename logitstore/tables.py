"""Parquet objects: columns of fixed width, read without an object a row, and a JSON header in the schema's metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from logitstore.digests import DIGEST_BYTES
from logitstore.errors import DamageError

_HEADER = b"logitstore"


def write_table(columns: Mapping[str, pa.Array], header: Mapping[str, Any]) -> bytes:
    """One Parquet file; equal columns and headers give equal bytes."""
    table = pa.table(dict(columns)).replace_schema_metadata({_HEADER: json.dumps(header, sort_keys=True)})
    sink = pa.BufferOutputStream()
    # Digests have no repetitions: a dictionary of them, or their smallest and largest, is so many bytes lost.
    repetitive = [field.name for field in table.schema if pa.types.is_string(field.type)]
    pq.write_table(table, sink, compression="zstd", use_dictionary=repetitive, write_statistics=False)
    return sink.getvalue().to_pybytes()


def read_table(data: bytes) -> tuple[pa.Table, dict[str, Any]]:
    """A table written by ``write_table``, each column in one chunk, and its header.

    Raises:
        DamageError: not such a table.
    """
    try:
        table = pq.read_table(pa.BufferReader(data), use_threads=False).combine_chunks()
        return table, json.loads(table.schema.metadata[_HEADER])
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise DamageError(f"not a readable table ({error})") from error


def from_digests(packed: np.ndarray) -> pa.Array:
    """Args: uint8 [N, 32]."""
    buffer = pa.py_buffer(np.ascontiguousarray(packed).reshape(-1))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(DIGEST_BYTES), len(packed), [None, buffer])


def from_lists(offsets: np.ndarray, values: np.ndarray) -> pa.Array:
    """Ragged rows: row n is ``values[offsets[n] : offsets[n + 1]]``."""
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))


def to_digests(table: pa.Table, name: str) -> np.ndarray:
    """uint8 [N, 32] of a column, not copied."""
    array = _array(table, name)
    if not len(array):
        return np.empty((0, DIGEST_BYTES), np.uint8)
    packed = np.frombuffer(array.buffers()[1], np.uint8).reshape(-1, DIGEST_BYTES)
    return packed[array.offset : array.offset + len(array)]


def to_values(table: pa.Table, name: str) -> np.ndarray:
    """[N] numbers or truth values of a column without nulls."""
    return _array(table, name).to_numpy(zero_copy_only=False)


def to_lists(table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(offsets int64 [N + 1], values) of a column of lists."""
    array = _array(table, name)
    offsets = array.offsets.to_numpy().astype(np.int64)
    return offsets - offsets[0], array.flatten().to_numpy(zero_copy_only=False)


def _array(table: pa.Table, name: str) -> pa.Array:
    chunks = table.column(name).chunks
    return chunks[0] if chunks else pa.array([], table.schema.field(name).type)
