"""Sparse distributions: per row, a few (token id, quantised log-prob) entries.

In a store they are a rectangular ``uint64 [T, K]`` array, so that anyone with zarr can look; in memory they are ragged,
because rows of ``threshold`` selections differ in length by two orders of magnitude.

    bits 0..31   token id
    bits 32..47  quanta: -log p / STEP_NATS, rounded
    bit  48      sampled: kept by a draw (weight theta), not for certain (weight p)
    all ones     fill: no entry here or further right

Column 0 is the realised token. The other entries follow by (quanta ascending, id ascending). A row without entries was
not scored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

STEP_NATS = 1 / 16
"""Width of a quantum of log-prob: decoded values are off by at most half of it, and forward KL by about step^2 / 24."""

MAX_QUANTA = 0xFFFF
FILL = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_UNUSED_BITS = np.uint64(0xFFFE_0000_8000_0000)
_ID_MASK, _QUANTA_SHIFT, _SAMPLED_SHIFT = np.uint64(0xFFFF_FFFF), np.uint64(32), np.uint64(48)


@dataclass(frozen=True)
class SparseRows:
    """Ragged rows. Entries of row t are those from ``offsets[t]`` to ``offsets[t + 1]``.

    Attributes:
        offsets: int64 [T + 1].
        ids: int32 [E], token ids.
        quanta: uint16 [E], -log p in units of ``STEP_NATS``.
        sampled: bool [E].
    """

    offsets: np.ndarray
    ids: np.ndarray
    quanta: np.ndarray
    sampled: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_entries(self) -> int:
        return len(self.ids)

    @property
    def counts(self) -> np.ndarray:
        """int64 [T], entries per row."""
        return np.diff(self.offsets)

    @property
    def scored(self) -> np.ndarray:
        """bool [T]: rows that hold a distribution."""
        return self.counts > 0

    def logprobs(self) -> np.ndarray:
        """float32 [E], nats, normalised over the whole vocabulary, each within ``STEP_NATS / 2``."""
        return dequantise(self.quanta)

    def slice_rows(self, begin: int, end: int) -> SparseRows:
        first, last = self.offsets[begin], self.offsets[end]
        return SparseRows(
            self.offsets[begin : end + 1] - first,
            self.ids[first:last],
            self.quanta[first:last],
            self.sampled[first:last],
        )

    def entries(self) -> np.ndarray:
        """uint64 [E], packed as in the stored array."""
        packed = self.ids.astype(np.uint64)
        packed |= self.quanta.astype(np.uint64) << _QUANTA_SHIFT
        packed |= self.sampled.astype(np.uint64) << _SAMPLED_SHIFT
        return packed

    def rectangle(self, width: int) -> np.ndarray:
        """uint64 [T, width], the array that a reader of the store sees."""
        table = np.full((self.num_rows, width), FILL)
        table[np.arange(width)[None, :] < self.counts[:, None]] = self.entries()
        return table

    @classmethod
    def from_rectangle(cls, table: np.ndarray) -> SparseRows:
        """The inverse of ``rectangle``.

        Raises:
            ValueError: an entry stands to the right of fill, or has bits that no field holds.
        """
        kept = table != FILL
        counts = kept.sum(axis=1, dtype=np.int64)
        if (kept != (np.arange(table.shape[1])[None, :] < counts[:, None])).any():
            raise ValueError("sparse rows are filled from the left: found an entry to the right of fill")
        packed = table[kept]
        if (packed & _UNUSED_BITS).any():
            raise ValueError("sparse rows: bits 31 and 49 to 63 of an entry are zero: token ids are below 2^31")
        return cls(
            offsets_of(counts),
            (packed & _ID_MASK).astype(np.int32),
            ((packed >> _QUANTA_SHIFT) & np.uint64(MAX_QUANTA)).astype(np.uint16),
            ((packed >> _SAMPLED_SHIFT) & np.uint64(1)).astype(bool),
        )

    @classmethod
    def concatenate(cls, parts: list[SparseRows]) -> SparseRows:
        return cls(
            offsets_of(np.concatenate([part.counts for part in parts])),
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.quanta for part in parts]),
            np.concatenate([part.sampled for part in parts]),
        )


def quantise(logprobs: np.ndarray) -> np.ndarray:
    """uint16 quanta of log-probs in nats (any shape); values below -4096 nats are clipped to it."""
    return np.clip(np.rint(logprobs * (-1 / STEP_NATS)), 0, MAX_QUANTA).astype(np.uint16)


def dequantise(quanta: np.ndarray) -> np.ndarray:
    """float32 log-probs in nats of uint16 quanta (any shape)."""
    return quanta.astype(np.float32) * np.float32(-STEP_NATS)


def offsets_of(counts: np.ndarray) -> np.ndarray:
    """int64 [T + 1] offsets of ragged rows with ``counts`` [T] entries."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets
