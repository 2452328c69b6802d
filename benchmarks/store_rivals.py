"""Layouts that others store top-k signals in, re-implemented from what they do, byte by byte.

None of them is given less than it has: kernels are compiled, and what frames the records of a file (checksums, tar
headers, indexes) is left out.

Shapes: T rows, K candidates, by (log-prob descending, id ascending).
"""

from __future__ import annotations

import io
import math
import struct
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from bit_packing import pack_bits, unpack_bits
from numcodecs import zstd
from protobuf_wire import feature, features, field, read_varints, varints

_ZSTD_LEVEL = 3
_RECORD_ROWS = 2048
"""Rows of one record, where a layout has such: a sequence."""
_SMALLEST_SINGULAR = 1e-5
DRAWS = 50
"""Of RS-KD."""
_DRAW_ID_BITS = 17


class Candidates(NamedTuple):
    """int32 token ids and float32 log-probs in nats, [T, K] each."""

    ids: np.ndarray
    logprobs: np.ndarray


class Layout(Protocol):
    @property
    def name(self) -> str: ...

    def encode(self, rows: Candidates) -> bytes: ...

    def decode(self, data: bytes) -> Candidates: ...


@dataclass(frozen=True)
class MaxText:
    """A ``tf.train.Example`` a sequence, of packed int64 varints and packed fp32; its length before it."""

    k: int

    @property
    def name(self) -> str:
        return f"MaxText, k={self.k}"

    def encode(self, rows: Candidates) -> bytes:
        records = []
        for begin in range(0, len(rows.ids), _RECORD_ROWS):
            ids, logprobs = rows.ids[begin : begin + _RECORD_ROWS], rows.logprobs[begin : begin + _RECORD_ROWS]
            int64_list = varints(ids.reshape(-1)).tobytes()
            entries = feature(b"top_k_indices", 3, int64_list)
            entries += feature(b"top_k_logits", 2, logprobs.astype("<f4").tobytes())
            example = field(1, entries)
            records.append(struct.pack("<I", len(example)) + example)
        return b"".join(records)

    def decode(self, data: bytes) -> Candidates:
        ids, logprobs, at = [], [], 0
        while at < len(data):
            (length,) = struct.unpack_from("<I", data, at)
            found = features(memoryview(data)[at + 4 : at + 4 + length])
            logprobs.append(np.frombuffer(found[b"top_k_logits"], "<f4").reshape(-1, self.k))
            ids.append(read_varints(np.frombuffer(found[b"top_k_indices"], np.uint8), logprobs[-1].size))
            at += 4 + length
        return Candidates(np.concatenate(ids).reshape(-1, self.k), np.concatenate(logprobs))


@dataclass(frozen=True)
class Megatron:
    """fp16 values, uint16 ids and a byte for the seventeenth bit, one after another, under zstd."""

    k: int

    @property
    def name(self) -> str:
        return f"Megatron PR 5019, k={self.k}"

    def encode(self, rows: Candidates) -> bytes:
        if rows.ids.max(initial=0) >= 1 << 17:
            raise ValueError(f"{self.name} holds ids below 2^17, found {rows.ids.max()}")
        planes = (rows.logprobs.astype("<f2"), rows.ids.astype("<u2"), (rows.ids >> 16).astype(np.uint8))
        return zstd.compress(b"".join(plane.tobytes() for plane in planes), _ZSTD_LEVEL)

    def decode(self, data: bytes) -> Candidates:
        planes = np.frombuffer(zstd.decompress(data), np.uint8)
        size = len(planes) // 5
        values, low, high = planes[: 2 * size].view("<f2"), planes[2 * size : 4 * size].view("<u2"), planes[4 * size :]
        ids = low.astype(np.int32) | (high.astype(np.int32) << 16)
        return Candidates(ids.reshape(-1, self.k), values.astype(np.float32).reshape(-1, self.k))


@dataclass(frozen=True)
class DistillKit:
    """bf16 for the first, a least-squares curve in the place among the rest for the others, ids in ceil(log2 V) bits.

    Attributes:
        label: of the configuration.
        vocabulary_size: V.
        k: candidates of a row.
        exact: how many are stored as they are.
        powers: of the place, 0.5 for a square root; one float32 coefficient each.
        best_fit: whether these bytes hold the best curve there is. If not, it is the one that torch's float32 singular
            values lead to, as in its own code; with some libraries these are far off, since the terms reach 111^4.
    """

    label: str
    vocabulary_size: int
    k: int
    exact: int
    powers: tuple[float, ...]
    best_fit: bool = False

    @property
    def name(self) -> str:
        return f"DistillKit {self.label}, k={self.k}" + (", best fit" if self.best_fit else "")

    @property
    def row_bytes(self) -> int:
        return 2 * self.exact + 4 * len(self.powers) + (self.k * self._id_bits + 7) // 8

    def encode(self, rows: Candidates) -> bytes:
        head = _to_bfloat16(rows.logprobs[:, : self.exact])
        curve = self._fit(rows.logprobs[:, self.exact :].T)
        ids = np.zeros((len(rows.ids), (self.k * self._id_bits + 7) // 8), np.uint8)
        pack_bits(rows.ids, self._id_bits, ids)
        columns = (head.view(np.uint8), np.ascontiguousarray(curve.T, "<f4").view(np.uint8), ids)
        return np.concatenate(columns, axis=1).tobytes()

    def decode(self, data: bytes) -> Candidates:
        table = np.frombuffer(data, np.uint8).reshape(-1, self.row_bytes)
        head, curve, packed = np.split(table, np.cumsum([2 * self.exact, 4 * len(self.powers)]), axis=1)
        coefficients = np.ascontiguousarray(curve).view("<f4")
        logprobs = np.empty((len(table), self.k), np.float32)
        logprobs[:, : self.exact] = (np.ascontiguousarray(head).view("<u2").astype(np.uint32) << 16).view(np.float32)
        logprobs[:, self.exact :] = coefficients @ self._terms().T.astype(np.float32)
        ids = np.empty((len(table), self.k), np.int32)
        unpack_bits(np.ascontiguousarray(packed), self._id_bits, ids)
        return Candidates(ids, logprobs)

    @property
    def _id_bits(self) -> int:
        return math.ceil(math.log2(self.vocabulary_size))

    def _fit(self, logprobs_KT: np.ndarray) -> np.ndarray:
        """Coefficients by singular values; small ones count as none."""
        dtype = torch.float64 if self.best_fit else torch.float32
        left, singular, right = torch.linalg.svd(torch.from_numpy(self._terms()).to(dtype), full_matrices=False)
        inverse = torch.where(singular > _SMALLEST_SINGULAR, 1 / singular, 0.0)
        return (right.T @ (inverse[:, None] * (left.T @ torch.from_numpy(logprobs_KT).to(dtype)))).numpy()

    def _terms(self) -> np.ndarray:
        return np.arange(self.k - self.exact, dtype=np.float64)[:, None] ** np.array(self.powers)


def distillkit_recommended(vocabulary_size: int, *, best_fit: bool = False) -> DistillKit:
    return DistillKit("recommended", vocabulary_size, 128, 16, (0, 1, 2, 3, 4, 0.5), best_fit)


def distillkit_budget(vocabulary_size: int, *, best_fit: bool = False) -> DistillKit:
    return DistillKit("budget", vocabulary_size, 50, 1, (0, 1, 0.5), best_fit)


@dataclass(frozen=True)
class RawZstd:
    """int32 and fp32 arrays under zstd."""

    k: int

    @property
    def name(self) -> str:
        return f"raw + zstd, k={self.k}"

    def encode(self, rows: Candidates) -> bytes:
        return zstd.compress(rows.ids.astype("<i4").tobytes() + rows.logprobs.astype("<f4").tobytes(), _ZSTD_LEVEL)

    def decode(self, data: bytes) -> Candidates:
        words = np.frombuffer(zstd.decompress(data), "<i4")
        ids, logprobs = words.reshape(2, -1, self.k)
        return Candidates(ids, logprobs.view("<f4"))


@dataclass(frozen=True)
class ParquetZstd:
    """A Parquet file with a list of ids and one of log-probs a row, under zstd."""

    k: int

    @property
    def name(self) -> str:
        return f"parquet + zstd, k={self.k}"

    def encode(self, rows: Candidates) -> bytes:
        columns = {
            "ids": pa.FixedSizeListArray.from_arrays(pa.array(rows.ids.reshape(-1)), self.k),
            "logprobs": pa.FixedSizeListArray.from_arrays(pa.array(rows.logprobs.reshape(-1)), self.k),
        }
        file = io.BytesIO()
        pq.write_table(pa.table(columns), file, compression="zstd", compression_level=_ZSTD_LEVEL)
        return file.getvalue()

    def decode(self, data: bytes) -> Candidates:
        table = pq.read_table(io.BytesIO(data), use_threads=False)
        ids, logprobs = (
            table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(-1, self.k)
            for name in ("ids", "logprobs")
        )
        return Candidates(ids, logprobs)


@dataclass(frozen=True)
class RandomSampling:
    """RS-KD: an id of 17 bits and a count of 7 for each distinct one of ``DRAWS`` draws; counts that add up end a row.

    Rows are the draws in id order, [T, DRAWS], each with the log of its id's share of them.
    """

    @property
    def name(self) -> str:
        return f"RS-KD, {DRAWS} draws, 3 B an entry"

    def encode(self, rows: Candidates) -> bytes:
        if rows.ids.max(initial=0) >= 1 << _DRAW_ID_BITS:
            raise ValueError(f"{self.name} holds ids below 2^{_DRAW_ID_BITS}, found {rows.ids.max()}")
        draws = rows.ids.reshape(-1)
        first = np.ones(len(draws), bool)
        first[1:] = draws[1:] != draws[:-1]
        first[::DRAWS] = True
        starts = np.flatnonzero(first)
        counts = np.diff(np.append(starts, len(draws)))
        words = draws[starts].astype("<u4") | (counts << _DRAW_ID_BITS).astype("<u4")
        return words.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()

    def decode(self, data: bytes) -> Candidates:
        bytes_ = np.zeros((len(data) // 3, 4), np.uint8)
        bytes_[:, :3] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        words = bytes_.reshape(-1).view("<u4")
        counts = words >> _DRAW_ID_BITS
        ids = (words & ((1 << _DRAW_ID_BITS) - 1)).astype(np.int32)
        shares = np.log(counts.astype(np.float32) / np.float32(DRAWS))
        return Candidates(np.repeat(ids, counts).reshape(-1, DRAWS), np.repeat(shares, counts).reshape(-1, DRAWS))


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    """uint16, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
