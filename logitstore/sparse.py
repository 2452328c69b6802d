"""Sparse distributions: per row, a few (token id, quantised log-prob) entries.

In a store they are a rectangular ``uint64 [T, K]`` array, so that anyone with zarr can look; in memory they are ragged,
because rows of ``threshold`` selections differ in length by two orders of magnitude.

    bits 0..31   token id
    bits 32..47  quanta: -log p / step_nats, rounded; 0xFFFF: not stored, which only sampled entries may do without
    bits 48..63  draws: 0 where kept for certain (weight p), else how many draws hit it (weight draws * draw_weight)
    all ones     fill: no entry here or further right

``step_nats`` and ``draw_weight`` are attributes of the array. Column 0 is the realised token. The other entries follow
by (quanta ascending, id ascending), so those without a log-prob come last, by id. A row without entries was not scored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DEFAULT_STEP_NATS = 0.1
"""Width of a quantum of log-prob: decoded values are off by at most half of it, and forward KL by about step^2 / 24."""

MAX_QUANTA = 0xFFFE
NOT_STORED = 0xFFFF
MAX_DRAWS = 0xFFFE
FILL = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_UNUSED_BIT = np.uint64(0x8000_0000)
_ID_MASK, _LOW_16, _QUANTA_SHIFT, _DRAWS_SHIFT = (np.uint64(n) for n in (0xFFFF_FFFF, 0xFFFF, 32, 48))


@dataclass(frozen=True)
class SparseRows:
    """Ragged rows. Entries of row t are those from ``offsets[t]`` to ``offsets[t + 1]``.

    Attributes:
        offsets: int64 [T + 1].
        ids: int32 [E], token ids.
        quanta: uint16 [E], -log p in units of ``step_nats``; ``NOT_STORED`` where that is unknown.
        draws: uint16 [E], 0 where kept for certain, else the number of draws.
        step_nats: of the quanta.
    """

    offsets: np.ndarray
    ids: np.ndarray
    quanta: np.ndarray
    draws: np.ndarray
    step_nats: float = DEFAULT_STEP_NATS

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

    @property
    def sampled(self) -> np.ndarray:
        """bool [E]: entries kept by a draw, not for certain."""
        return self.draws > 0

    def logprobs(self) -> np.ndarray:
        """float32 [E], nats, over the whole vocabulary, each within ``step_nats / 2``; NaN where not stored."""
        return dequantise(self.quanta, self.step_nats)

    def slice_rows(self, begin: int, end: int) -> SparseRows:
        first, last = self.offsets[begin], self.offsets[end]
        return SparseRows(
            self.offsets[begin : end + 1] - first,
            self.ids[first:last],
            self.quanta[first:last],
            self.draws[first:last],
            self.step_nats,
        )

    def entries(self) -> np.ndarray:
        """uint64 [E], packed as in the stored array."""
        packed = self.ids.astype(np.uint64)
        packed |= self.quanta.astype(np.uint64) << _QUANTA_SHIFT
        packed |= self.draws.astype(np.uint64) << _DRAWS_SHIFT
        return packed

    def rectangle(self, width: int) -> np.ndarray:
        """uint64 [T, width], the array that a reader of the store sees."""
        table = np.full((self.num_rows, width), FILL)
        table[np.arange(width)[None, :] < self.counts[:, None]] = self.entries()
        return table

    @classmethod
    def from_rectangle(cls, table: np.ndarray, step_nats: float = DEFAULT_STEP_NATS) -> SparseRows:
        """The inverse of ``rectangle``.

        Raises:
            ValueError: an entry stands to the right of fill, or holds what no entry may.
        """
        kept = table != FILL
        counts = kept.sum(axis=1, dtype=np.int64)
        if (kept != (np.arange(table.shape[1])[None, :] < counts[:, None])).any():
            raise ValueError("sparse rows are filled from the left: found an entry to the right of fill")
        packed = table[kept]
        if (packed & _UNUSED_BIT).any():
            raise ValueError("sparse rows: bit 31 of an entry is zero: token ids are below 2^31")
        quanta = ((packed >> _QUANTA_SHIFT) & _LOW_16).astype(np.uint16)
        draws = (packed >> _DRAWS_SHIFT).astype(np.uint16)
        if (draws > MAX_DRAWS).any() or (quanta[draws == 0] == NOT_STORED).any():
            raise ValueError(f"sparse rows: at most {MAX_DRAWS} draws, and log-probs of all entries kept for certain")
        return cls(offsets_of(counts), (packed & _ID_MASK).astype(np.int32), quanta, draws, step_nats)

    @classmethod
    def concatenate(cls, parts: list[SparseRows]) -> SparseRows:
        """Rows of one step, one part after the other."""
        return cls(
            offsets_of(np.concatenate([part.counts for part in parts])),
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.quanta for part in parts]),
            np.concatenate([part.draws for part in parts]),
            parts[0].step_nats,
        )


def quantise(logprobs: np.ndarray, step_nats: float = DEFAULT_STEP_NATS) -> np.ndarray:
    """uint16 quanta of log-probs in nats (any shape); what is below ``-MAX_QUANTA * step_nats`` is clipped to it."""
    return np.clip(np.rint(logprobs * (-1 / step_nats)), 0, MAX_QUANTA).astype(np.uint16)


def coarse_quanta(step_nats: float, tail_step_nats: float) -> np.ndarray:
    """uint16 [65535]: what each quantum is rounded to where unlikely tokens are told apart less well.

    KL feels an error of log p by p * error^2, so the cheapest rounding has steps in proportion to 1 / sqrt(p). Here
    they double with every factor of 4 below p = 1/64, up to ``tail_step_nats``, and stay multiples of ``step_nats``.
    """
    quanta = np.arange(MAX_QUANTA + 1)
    octaves = np.floor(quanta * step_nats / np.log(4.0)) - 2
    most = max(0, int(np.floor(np.log2(tail_step_nats / step_nats) + 1e-6)))
    multiple = 2 ** np.clip(octaves, 0, most).astype(np.int64)
    return np.minimum(np.rint(quanta / multiple).astype(np.int64) * multiple, MAX_QUANTA).astype(np.uint16)


def dequantise(quanta: np.ndarray, step_nats: float = DEFAULT_STEP_NATS) -> np.ndarray:
    """float32 log-probs in nats of uint16 quanta (any shape); NaN where not stored."""
    logprobs = quanta.astype(np.float32) * np.float32(-step_nats)
    logprobs[quanta == NOT_STORED] = np.nan
    return logprobs


def offsets_of(counts: np.ndarray) -> np.ndarray:
    """int64 [T + 1] offsets of ragged rows with ``counts`` [T] entries."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets
