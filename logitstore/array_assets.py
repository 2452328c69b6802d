"""Named arrays as one object, in the layout of safetensors, which reads it too.

    8 bytes        length of the header, little-endian
    header         canonical JSON, spaces after it up to a multiple of 8: {"__metadata__": {name: text}, name of an
                   array: {"dtype", "shape", "data_offsets": [begin, end)}}
    data           the arrays, the widest numbers first and then by name, little-endian, C order, one after the other

The same arrays give the same bytes, so that they can be named by their digest; nothing is compressed, because what a
compressor makes of them depends on its version.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from logitstore.digests import canonical_json
from logitstore.errors import DamageError

_DTYPES = {"U8": "|u1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "F32": "<f4"}
_NAMES = {np.dtype(code): name for name, code in _DTYPES.items()}
_METADATA = "__metadata__"


def encode_arrays(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """One object of some arrays (uint8, int16, int32, int64 or float32) and texts about them."""
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    chunks, end = [], 0
    for name in sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name)):  # so that all are aligned
        dtype = np.dtype(arrays[name].dtype).newbyteorder("<")
        chunks.append(np.ascontiguousarray(arrays[name], dtype).tobytes())
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(arrays[name].shape),
            "data_offsets": [end, end + len(chunks[-1])],
        }
        end += len(chunks[-1])
    text = canonical_json(header)
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *chunks])


def decode_arrays(data: bytes, where: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read-only arrays by name, and the texts.

    Raises:
        DamageError: ``data`` is not such an object.
    """
    try:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        metadata = header.pop(_METADATA)
        arrays = {name: _array(memoryview(data)[8 + length :], described) for name, described in header.items()}
    except (struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DamageError(f"{where}: not an object of named arrays ({error}); run `logitstore verify`") from error
    return arrays, metadata


def _array(data: memoryview, described: Mapping[str, Any]) -> np.ndarray:
    begin, end = described["data_offsets"]
    if not 0 <= begin <= end <= len(data):
        raise ValueError(f"an array at bytes {begin} to {end} of {len(data)}")
    values = np.frombuffer(data[begin:end], np.dtype(_DTYPES[described["dtype"]])).reshape(described["shape"])
    values.flags.writeable = False
    return values
