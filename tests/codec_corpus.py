"""Streams of the codecs, as format 1 wrote them: they have to decode for ever, and their mutations must do no harm.

    python tests/codec_corpus.py write                 make the corpus (once a version of a codec)
    python tests/codec_corpus.py fuzz --inputs 1000000 decode so many mutations

Mutations are made behind checksums that hold, as an adversary would make them.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from sparse_strategies import random_rows, rows_of

from logitstore.codecs import row_stream
from logitstore.codecs.quantised import decode_columns, encode_columns
from logitstore.codecs.row_encoder import encode_rows
from logitstore.codecs.row_stream import HEADER_BYTES, decode_rows
from logitstore.errors import DamageError
from logitstore.sharding import with_crc
from logitstore.sparse import NOT_STORED, SparseRows

FOLDER = Path(__file__).parent / "corpora/codecs"
STEPS = ("0.1", "1", "0.1")
MAX_ROWS, MAX_ENTRIES = 200, 3000
"""Of the arrays that the streams are said to belong to."""


def write() -> None:
    """Write every stream with the values that it holds."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, (rows, group_rows) in _row_samples().items():
        (FOLDER / f"{name}.rows").write_bytes(encode_rows(rows, group_rows))
        np.save(FOLDER / f"{name}.rows.npy", rows.rectangle(max(1, int(rows.counts.max(initial=0)))))
    rng = np.random.default_rng(5)
    whole = np.stack(
        [-rng.geometric(0.1, 80), rng.geometric(0.5, 80), rng.choice(90_000, 7)[rng.integers(0, 7, 80)]], 1
    )
    values = whole.astype(np.float32) * np.array([np.float32(step) for step in STEPS])
    values[::9], values[4, 1] = np.nan, -np.inf
    (FOLDER / "scalars.columns").write_bytes(encode_columns(values, STEPS))
    np.save(FOLDER / "scalars.columns.npy", values)


def _row_samples() -> dict[str, tuple[SparseRows, int]]:
    draws = [[(7, 3, 0), (9, 1, 0), (2, NOT_STORED, 3), (8, NOT_STORED, 1)], [], [(8, 0, 0)]] * 20
    known = [[(7, 3, 0), (9, 1, 0), (5, 40, 1), (1, 41, 2)], [(1, 2, 0), (3, 3, 0), (4, 3, 0), (9, 3, 0)]] * 20
    return {
        "empty": (rows_of([[]]), 4096),
        "ragged": (random_rows(150), 64),
        "draws": (rows_of(draws), 16),
        "known": (rows_of(known), 4096),
        "large-ids": (rows_of([[(0x7FFFFFFF, 1, 0), (0x1000000, 2, 0)], [(5, 0xFFFE, 0)]] * 5), 4096),
    }


def decode(kind: str, data: bytes) -> None:
    """Decode a stream of a kind (``rows``, ``columns``) as part of an array that bounds it.

    Raises:
        DamageError: the bytes are not such a stream.
    """
    if kind == "rows":
        decode_rows(data, max_rows=MAX_ROWS, max_entries=MAX_ENTRIES)
    else:
        decode_columns(data, STEPS, 80)


def mutations(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Kind and bytes of damaged streams with checksums that hold: flipped, overwritten, cut, doubled, spliced."""
    rng = np.random.default_rng(seed)
    streams = [(path.suffix[1:], path.read_bytes()) for path in sorted(FOLDER.iterdir()) if path.suffix != ".npy"]
    for _ in range(count):
        kind, data = streams[rng.integers(len(streams))]
        damaged = bytearray(data if kind == "rows" else data[:-4])
        begin, end = sorted(rng.integers(0, len(damaged) + 1, 2).tolist())
        way = rng.integers(6)
        if way <= 1:
            for position in rng.integers(0, len(damaged), rng.integers(1, 4)):
                damaged[position] ^= 1 << int(rng.integers(8))
        elif way == 2:
            damaged[begin : begin + 4] = struct.pack(
                "<I", int(rng.choice([0, 1, 2**31, 2**32 - 1, rng.integers(2**32)]))
            )
        elif way == 3:
            del damaged[begin : begin + int(rng.integers(1, 9))]
        elif way == 4:
            damaged[end:end] = damaged[begin : begin + int(rng.integers(1, 9))]
        else:
            other = streams[rng.integers(len(streams))][1]
            damaged[begin:end] = other[begin:end]
        yield kind, _mended(kind, bytes(damaged))


def _mended(kind: str, data: bytes) -> bytes:
    if kind == "columns":
        return with_crc(data)
    if len(data) < HEADER_BYTES:
        return data
    model_bytes, num_groups = struct.unpack_from("<I", data, 4)[0], struct.unpack_from("<I", data, 24)[0]
    front_bytes = min(len(data), HEADER_BYTES + model_bytes + 24 * min(num_groups, 1 << 10))
    front = bytearray(data[:front_bytes])
    position = front_bytes
    for at in range(HEADER_BYTES + model_bytes, front_bytes - 23, 24):
        num_bytes = 4 * struct.unpack_from("<I", front, at + 8)[0]
        struct.pack_into("<I", front, at + 20, row_stream.crc32c(data[position : position + num_bytes]))
        position += num_bytes
    struct.pack_into("<I", front, HEADER_BYTES - 4, row_stream.front_crc(memoryview(front)))
    return bytes(front) + data[front_bytes:]


def fuzz(count: int, seed: int) -> tuple[int, int]:
    """Decode ``count`` mutations: how many were refused, how many decoded to other or the same values."""
    refused = 0
    for kind, data in mutations(count, seed):
        try:
            decode(kind, data)
        except DamageError:
            refused += 1
    return refused, count - refused


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write()
    else:
        count, began, refused, decoded = int(sys.argv[3]), time.monotonic(), 0, 0
        for seed in range(-(-count // 10_000)):
            found = fuzz(min(10_000, count - 10_000 * seed), 1000 + seed)
            refused, decoded = refused + found[0], decoded + found[1]
            print(
                f"{refused + decoded:,} inputs: {refused:,} refused, {decoded:,} decoded, "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
