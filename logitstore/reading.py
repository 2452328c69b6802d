"""Reading objects whose size and digest are known: in ranges, several at once, and never unchecked."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from blake3 import blake3

from logitstore.errors import DamageError
from logitstore.storage import Storage, map_threads

RANGE_BYTES = 8 << 20
"""Most bytes of one request: long enough that the wait for its first byte is small, short enough to try again."""

_RANGES_AT_ONCE = 4


def read_object(storage: Storage, name: str, num_bytes: int, digest: str) -> memoryview:
    """The bytes of an object.

    Args:
        storage: where it lies.
        name: of the object.
        num_bytes: its size.
        digest: hex BLAKE3 of its bytes.

    Raises:
        DamageError: it is missing, or is not the one of that size and digest. What follows those bytes in an object of
            several ranges is not looked for; ``check_end`` does.
    """
    where = storage.child_url(name)
    hasher = blake3(max_threads=1)
    try:
        if num_bytes <= RANGE_BYTES:
            data = memoryview(storage.read_whole(name, num_bytes))
            hasher.update(data)
        else:
            data = np.empty(num_bytes, np.uint8).data  # on Linux in huge pages, which are quick to get
            begin = 0
            for part in _read_parts(storage, name, num_bytes):
                data[begin : begin + len(part)] = part
                hasher.update(part)
                begin += len(part)
    except FileNotFoundError as error:
        raise DamageError(f"{where}: missing; run `logitstore verify`") from error
    if hasher.hexdigest() != digest:
        raise DamageError(f"{where}: damaged: its digest is not the sealed one; run `logitstore verify`")
    return data


def check_end(storage: Storage, name: str, num_bytes: int) -> None:
    """See that nothing follows what ``read_object`` reads: zarr looks for a shard's index at the end of the object.

    Raises:
        DamageError: the object is missing, or of another size.
    """
    if num_bytes <= RANGE_BYTES:
        return  # read in one piece, which would have been too long
    entry = storage.entry(name)
    if entry is None or entry.num_bytes != num_bytes:
        found = "missing" if entry is None else f"damaged: {num_bytes} bytes were sealed, {entry.num_bytes} found"
        raise DamageError(f"{storage.child_url(name)}: {found}; run `logitstore verify`")


def _read_parts(storage: Storage, name: str, num_bytes: int) -> Iterator[bytes | memoryview]:
    ranges = [(begin, min(begin + RANGE_BYTES, num_bytes)) for begin in range(0, num_bytes, RANGE_BYTES)]
    return map_threads(lambda ends: storage.read_range(name, *ends), ranges, _RANGES_AT_ONCE, ahead=_RANGES_AT_ONCE)
