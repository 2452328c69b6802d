"""As much of protocol buffers as ``tf.train.Example`` takes, compiled where there are many values."""

from __future__ import annotations

import numba
import numpy as np


def _varint(value: int) -> bytes:
    return varints(np.array([value], np.int64)).tobytes()


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field of a protocol buffer."""
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def feature(name: bytes, kind: int, packed: bytes) -> bytes:
    """An entry of ``Features.feature``: a name, and a list whose kind is 2 for floats, 3 for int64."""
    return field(1, field(1, name) + field(2, field(kind, field(1, packed))))


def _fields(message: memoryview) -> list[memoryview]:
    """Payloads of the length-delimited fields of a message."""
    found, at = [], 0
    while at < len(message):
        at += 1
        length, shift = 0, 0
        while True:
            byte = message[at]
            at += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        found.append(message[at : at + length])
        at += length
    return found


def features(example: memoryview) -> dict[bytes, memoryview]:
    """The packed list of each feature, by name."""
    entries = [_fields(entry) for entry in _fields(_fields(example)[0])]
    return {bytes(name): _fields(_fields(value)[0])[0] for name, value in entries}


@numba.njit(cache=True, nogil=True)
def varints(values: np.ndarray) -> np.ndarray:
    """uint8: seven bits a byte, the lowest first, the highest bit set on all but a number's last."""
    out = np.empty(10 * len(values), np.uint8)
    size = 0
    for value in values:
        rest = np.uint64(value)
        while rest >= 0x80:
            out[size] = (rest & np.uint64(0x7F)) | np.uint64(0x80)
            rest >>= np.uint64(7)
            size += 1
        out[size] = rest
        size += 1
    return out[:size]


@numba.njit(cache=True, nogil=True)
def read_varints(data: np.ndarray, count: int) -> np.ndarray:
    """int32 [count], the inverse of ``varints``."""
    values = np.empty(count, np.int32)
    at = 0
    for number in range(count):
        value, shift = np.int64(0), 0
        while True:
            byte = np.int64(data[at])
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        values[number] = value
    return values
