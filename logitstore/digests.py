"""BLAKE3 digests of bytes, of arrays and of canonical JSON: the names that everything in a store goes by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from blake3 import blake3

DIGEST_NAME = "blake3"
DIGEST_BYTES = 32


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    """Hex BLAKE3 (64 characters) of ``data``."""
    return blake3(data, max_threads=blake3.AUTO if len(data) > 1 << 20 else 1).hexdigest()


def digest_arrays(arrays: Mapping[str, np.ndarray]) -> str:
    """Content digest: over (name, dtype, shape, little-endian C-order values) of each array, in the order of names.

    It does not depend on chunks, codecs or library versions, so it is the identity of a result.
    """
    hasher = blake3(b"logitstore.content.1")
    for name in sorted(arrays):
        values = np.asarray(arrays[name], order="C")  # np.ascontiguousarray would make a scalar an array of one
        values = values.astype(values.dtype.newbyteorder("<"), copy=False)
        header = {"name": name, "dtype": values.dtype.name, "shape": list(values.shape)}
        hasher.update(canonical_json(header))
        hasher.update(values.reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()


def canonical_json(value: Any) -> bytes:
    """One spelling for one value: sorted keys, no spaces, UTF-8; floats are refused, since they have many spellings.

    Raises:
        TypeError: ``value`` holds a float or something JSON has no form for. Write numbers as decimal strings.
    """
    _refuse_floats(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_json(value: Any) -> str:
    """Digest of the canonical JSON of ``value``: the key of a recipe."""
    return digest_bytes(canonical_json(value))


def decimal(value: float) -> str:
    """The decimal string that a recipe holds for a number: shortest that reads back as the same float64."""
    return repr(float(value))


def _refuse_floats(value: Any) -> None:
    if isinstance(value, float):
        raise TypeError(f"canonical JSON holds no floats, found {value!r}: write it as a decimal string")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"canonical JSON has string keys, found {key!r}")
            _refuse_floats(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _refuse_floats(item)


def pack_digests(digests: Sequence[str]) -> np.ndarray:
    """uint8 [N, 32] of N hex digests: how tables hold them."""
    packed = np.frombuffer(bytes.fromhex("".join(digests)), np.uint8)
    return packed.reshape(len(digests), DIGEST_BYTES)


def unpack_digests(packed: np.ndarray) -> list[str]:
    """The inverse of ``pack_digests``."""
    text, width = np.ascontiguousarray(packed).tobytes().hex(), 2 * DIGEST_BYTES
    return [text[begin : begin + width] for begin in range(0, len(text), width)]
