"""Reading objects whose size and digest are known: in ranges, several at once, and never unchecked."""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

from logitstore.errors import DamageError
from logitstore.storage import Storage, map_threads

RANGE_BYTES = 8 << 20
"""Most bytes of one request: long enough that the wait for its first byte is small, short enough to try again."""

_RANGES_AT_ONCE = 4


def read_object(storage: Storage, name: str, num_bytes: int, digest: str) -> bytes:
    """All bytes of an object.

    Args:
        storage: where it lies.
        name: of the object.
        num_bytes: its size.
        digest: hex BLAKE3 of its bytes.

    Raises:
        DamageError: it is missing, or is not the one of that size and digest.
    """
    where = storage.child_url(name)
    hasher = blake3(max_threads=1)
    parts = []
    try:
        for part in _read_parts(storage, name, num_bytes):
            hasher.update(part)
            parts.append(part)
    except FileNotFoundError as error:
        raise DamageError(f"{where}: missing; run `logitstore verify`") from error
    if hasher.hexdigest() != digest:
        raise DamageError(f"{where}: damaged: its digest is not the sealed one; run `logitstore verify`")
    return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)


def _read_parts(storage: Storage, name: str, num_bytes: int) -> Iterable[bytes | memoryview]:
    if num_bytes <= RANGE_BYTES:
        return [storage.read(name)]
    ranges = [(begin, min(begin + RANGE_BYTES, num_bytes)) for begin in range(0, num_bytes, RANGE_BYTES)]
    return map_threads(lambda ends: storage.read_range(name, *ends), ranges, _RANGES_AT_ONCE)
