"""The blocks of a plan: a hundred thousand of them cost bytes, not objects.

Most documents occur once, and neighbours mostly come from one file, so what is kept by document are only exceptions
and runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
import pyarrow as pa

from logitstore import tables
from logitstore.digests import digest_arrays, pack_digests, unpack_digests
from logitstore.sparse import offsets_of

TRAIN, HELD_OUT = "train", "held_out"


@dataclass(frozen=True)
class PlanBlock:
    """One block of a plan.

    Attributes:
        digest: of its ordered document digests.
        split: ``train`` or ``held_out``.
        num_bytes: canonical UTF-8 bytes.
        multiplicities: per document, how often the corpus has it.
        sources: per document, an index into the plan's ``sources``.
        num_chats: documents that a chat template renders.
    """

    digest: str
    split: str
    num_documents: int
    num_bytes: int
    multiplicities: tuple[int, ...]
    sources: tuple[int, ...]
    num_chats: int = 0


@dataclass(frozen=True, eq=False)
class PlanBlocks(Sequence[PlanBlock]):
    """B blocks; a ``PlanBlock`` is made when one is asked for.

    Attributes:
        packed_digests: uint8 [B, 32].
        held_out: bool [B].
        num_documents: int64 [B].
        num_bytes: int64 [B].
        num_chats: int64 [B].
        repeats: int64 [R, 3]: block, document within it, how often the corpus has it; none that it has once.
        source_runs: int64 [S, 3]: block, end of the run within it, source that the run's documents come from.
    """

    packed_digests: np.ndarray
    held_out: np.ndarray
    num_documents: np.ndarray
    num_bytes: np.ndarray
    num_chats: np.ndarray
    repeats: np.ndarray
    source_runs: np.ndarray

    @classmethod
    def of(cls, blocks: Iterable[PlanBlock]) -> PlanBlocks:
        if isinstance(blocks, PlanBlocks):
            return blocks
        digests: list[str] = []
        numbers: list[tuple[bool, int, int, int]] = []
        repeats: list[tuple[int, int, int]] = []
        runs: list[tuple[int, int, int]] = []
        for number, block in enumerate(blocks):
            digests.append(block.digest)
            numbers.append((block.split == HELD_OUT, block.num_documents, block.num_bytes, block.num_chats))
            repeats += [(number, n, times) for n, times in enumerate(block.multiplicities) if times != 1]
            runs += [(number, end, source) for end, source in _runs(block.sources)]
        held_out, num_documents, num_bytes, num_chats = np.array(numbers, np.int64).reshape(-1, 4).T.copy()
        return cls(
            pack_digests(digests),
            held_out.astype(bool),
            num_documents,
            num_bytes,
            num_chats,
            np.array(repeats, np.int64).reshape(-1, 3),
            np.array(runs, np.int64).reshape(-1, 3),
        )

    def __len__(self) -> int:
        return len(self.held_out)

    @overload
    def __getitem__(self, number: int) -> PlanBlock: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[PlanBlock, ...]: ...
    def __getitem__(self, number: int | slice) -> PlanBlock | tuple[PlanBlock, ...]:
        if isinstance(number, slice):
            return tuple(self[n] for n in range(*number.indices(len(self))))
        number = range(len(self))[number]
        num_documents = int(self.num_documents[number])
        multiplicities = np.ones(num_documents, np.int64)
        repeats = _rows_of(self.repeats, number)
        multiplicities[repeats[:, 1]] = repeats[:, 2]
        runs = _rows_of(self.source_runs, number)
        sources = np.repeat(runs[:, 2], np.diff(runs[:, 1], prepend=0))
        return PlanBlock(
            self.packed_digests[number].tobytes().hex(),
            HELD_OUT if self.held_out[number] else TRAIN,
            num_documents,
            int(self.num_bytes[number]),
            tuple(multiplicities.tolist()),
            tuple(sources.tolist()),
            int(self.num_chats[number]),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlanBlocks):
            return NotImplemented
        return all(np.array_equal(mine, theirs) for mine, theirs in zip(self._arrays(), other._arrays(), strict=True))

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def digests(self) -> list[str]:
        """By block, its digest."""
        return unpack_digests(self.packed_digests)

    @property
    def num_duplicates(self) -> int:
        """Documents that the corpus has over and above the first of their kind."""
        return int((self.repeats[:, 2] - 1).sum())

    @cached_property
    def identity(self) -> str:
        """Digest of what the blocks mean: their documents, order, split and multiplicities."""
        meaning = {"digests": self.packed_digests, "held_out": self.held_out, "repeats": self.repeats}
        return digest_arrays(meaning)

    def to_columns(self) -> dict[str, pa.Array]:
        return {
            "digest": tables.from_digests(self.packed_digests),
            "held_out": pa.array(self.held_out),
            "num_documents": pa.array(self.num_documents),
            "num_bytes": pa.array(self.num_bytes),
            "num_chats": pa.array(self.num_chats),
            "repeats": self._pairs_by_block(self.repeats),
            "source_runs": self._pairs_by_block(self.source_runs),
        }

    @classmethod
    def from_table(cls, table: tables.StoredTable) -> PlanBlocks:
        plain = [table.values(name) for name in ("held_out", "num_documents", "num_bytes", "num_chats")]
        pairs = [_with_blocks(*table.lists(name)) for name in ("repeats", "source_runs")]
        return cls(table.digests("digest"), *plain, *pairs)

    def _pairs_by_block(self, rows: np.ndarray) -> pa.Array:
        counts = np.bincount(rows[:, 0], minlength=len(self))
        return tables.from_lists(offsets_of(2 * counts), rows[:, 1:].reshape(-1))

    def _arrays(self) -> Iterator[np.ndarray]:
        yield from (self.packed_digests, self.held_out, self.num_documents, self.num_bytes, self.num_chats)
        yield from (self.repeats, self.source_runs)


def _runs(sources: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(end, source) of each run of equal sources."""
    values = np.asarray(sources, np.int64)
    ends = np.flatnonzero(np.diff(values, append=-1)) + 1
    yield from zip(ends.tolist(), values[ends - 1].tolist(), strict=True)


def _rows_of(rows: np.ndarray, block: int) -> np.ndarray:
    begin, end = np.searchsorted(rows[:, 0], [block, block + 1])
    return rows[begin:end]


def _with_blocks(offsets: np.ndarray, values: np.ndarray) -> np.ndarray:
    blocks = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets) // 2)
    return np.column_stack([blocks, values.astype(np.int64).reshape(-1, 2)])
