"""Parquet objects: columns of fixed width, read without an object a row, and a JSON header in the schema's metadata."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from logitstore.digests import DIGEST_BYTES
from logitstore.errors import DamageError

_HEADER = b"logitstore"
_UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError, TypeError)


def write_table(columns: Mapping[str, pa.Array], header: Mapping[str, Any]) -> bytes:
    """One Parquet file; equal columns and headers give equal bytes."""
    table = pa.table(dict(columns)).replace_schema_metadata({_HEADER: json.dumps(header, sort_keys=True)})
    sink = pa.BufferOutputStream()
    # Digests have no repetitions: a dictionary of them, or their smallest and largest, is so many bytes lost.
    repetitive = [field.name for field in table.schema if pa.types.is_string(field.type)]
    pq.write_table(table, sink, compression="zstd", use_dictionary=repetitive, write_statistics=False)
    return sink.getvalue().to_pybytes()


class StoredTable:
    """A table written by ``write_table``: a column is decoded when it is asked for, by whichever thread.

    Attributes:
        header: as it was written.
        column_names: of all columns.
    """

    def __init__(self, data: bytes) -> None:
        """
        Raises:
            DamageError: ``data`` is no such table.
        """
        # A ParquetFile promises nothing to threads, and two reads of one have ended in a segmentation fault.
        self._lock = threading.Lock()
        try:
            self._file = pq.ParquetFile(pa.BufferReader(data))
            self.header: dict[str, Any] = json.loads(self._file.schema_arrow.metadata[_HEADER])
        except _UNREADABLE as error:
            raise DamageError(f"not a readable table ({error})") from error
        self.column_names: list[str] = self._file.schema_arrow.names

    def table(self) -> pa.Table:
        """All columns, each in one chunk."""
        return self._read(None)

    def digests(self, name: str) -> np.ndarray:
        """uint8 [N, 32]."""
        array = self._column(name)
        if not len(array):
            return np.empty((0, DIGEST_BYTES), np.uint8)
        packed = np.frombuffer(array.buffers()[1], np.uint8).reshape(-1, DIGEST_BYTES)
        return packed[array.offset : array.offset + len(array)]

    def values(self, name: str) -> np.ndarray:
        """[N] numbers or truth values, of which none is missing."""
        return self._column(name).to_numpy(zero_copy_only=False)

    def lists(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(offsets int64 [N + 1], values) of a column of lists."""
        array = self._column(name)
        offsets = array.offsets.to_numpy().astype(np.int64)
        return offsets - offsets[0], array.flatten().to_numpy(zero_copy_only=False)

    def _column(self, name: str) -> pa.Array:
        column = self._read([name]).column(name)
        return column.chunk(0) if column.num_chunks else pa.array([], column.type)

    def _read(self, names: list[str] | None) -> pa.Table:
        try:
            with self._lock:
                return self._file.read(names, use_threads=False).combine_chunks()
        except _UNREADABLE as error:
            raise DamageError(f"not a readable table ({error})") from error


def from_digests(packed: np.ndarray) -> pa.Array:
    """Args: uint8 [N, 32]."""
    buffer = pa.py_buffer(np.ascontiguousarray(packed).reshape(-1))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(DIGEST_BYTES), len(packed), [None, buffer])


def from_lists(offsets: np.ndarray, values: np.ndarray) -> pa.Array:
    """Ragged rows: row n is ``values[offsets[n] : offsets[n + 1]]``."""
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))
