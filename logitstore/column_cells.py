"""The cells of a column: which part answers each block, for a hundred thousand blocks in a few megabytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

import numpy as np
import pyarrow as pa

from logitstore import tables
from logitstore.digests import DIGEST_BYTES, digest_arrays, pack_digests, unpack_digests
from logitstore.recipes import Answer

_STATS = "stats."
_DIGESTS = ("part", "content")


@dataclass(frozen=True)
class Cell:
    """A column's part for one block.

    Attributes:
        part: digest of the part.
        content: digest of its decoded values.
        stats: whole numbers about it, see ``Answer``.
    """

    part: str
    content: str
    stats: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.stats.get("num_rows", 0)

    @property
    def num_bytes(self) -> int:
        return sum(value for name, value in self.stats.items() if name.startswith("bytes."))

    def answer(self) -> Answer:
        return Answer({"part": self.part, "content": self.content}, dict(self.stats))


class ColumnCells(Sequence[Cell | None]):
    """B cells, None where a block has no answer yet; a ``Cell`` is made when one is asked for."""

    def __init__(
        self, answered: np.ndarray, parts: np.ndarray, contents: np.ndarray, stats: Mapping[str, np.ndarray]
    ) -> None:
        """
        Args:
            answered: bool [B].
            parts: uint8 [B, 32], digests; zero where there is no answer, as is everything below.
            contents: uint8 [B, 32].
            stats: int64 [B] by name. A statistic that a part does not have counts as 0.
        """
        named = {_STATS + name: values for name, values in stats.items()}
        self._arrays: Mapping[str, np.ndarray] = {"answered": answered, "part": parts, "content": contents, **named}

    @property
    def answered(self) -> np.ndarray:
        return self._arrays["answered"]

    @property
    def parts(self) -> np.ndarray:
        return self._arrays["part"]

    @property
    def contents(self) -> np.ndarray:
        return self._arrays["content"]

    @property
    def stats(self) -> dict[str, np.ndarray]:
        names = sorted(name for name in self._arrays if name.startswith(_STATS))
        return {name.removeprefix(_STATS): self._arrays[name] for name in names}

    @classmethod
    def empty(cls, num_blocks: int) -> ColumnCells:
        digests = np.zeros((num_blocks, DIGEST_BYTES), np.uint8)
        return cls(np.zeros(num_blocks, bool), digests, digests, {})

    @classmethod
    def of(cls, cells: Iterable[Cell | Answer | None]) -> ColumnCells:
        if isinstance(cells, ColumnCells):
            return cells
        listed = list(cells)
        return cls.empty(len(listed)).with_answers((n, cell) for n, cell in enumerate(listed) if cell is not None)

    def __len__(self) -> int:
        return len(self.answered)

    @overload
    def __getitem__(self, block: int) -> Cell | None: ...
    @overload
    def __getitem__(self, block: slice) -> tuple[Cell | None, ...]: ...
    def __getitem__(self, block: int | slice) -> Cell | tuple[Cell | None, ...] | None:
        if isinstance(block, slice):
            return tuple(self[n] for n in range(*block.indices(len(self))))
        if not self.answered[block]:
            return None
        stats = {name: value for name, values in self.stats.items() if (value := int(values[block]))}
        return Cell(self.part(block), self.contents[block].tobytes().hex(), stats)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ColumnCells):
            return NotImplemented
        mine, theirs = self._told(), other._told()
        return mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in mine)

    __hash__ = None  # type: ignore[assignment]

    def part(self, block: int) -> str:
        """Digest of the part of a block that has one."""
        return self.parts[block].tobytes().hex()

    @property
    def num_bytes(self) -> int:
        """Stored bytes of all parts."""
        return sum(int(values.sum()) for name, values in self.stats.items() if name.startswith("bytes."))

    @cached_property
    def identity(self) -> str:
        """Digest of the contents by block; neither parts nor statistics enter it."""
        return digest_arrays({"answered": self.answered, "contents": self.contents})

    def part_digests(self) -> set[str]:
        return set(unpack_digests(self.parts[self.answered]))

    def take(self, blocks: np.ndarray) -> ColumnCells:
        """Cells in another order.

        Args:
            blocks: int64 [C], the block to take each new cell from; -1 for one without an answer.
        """
        if not len(self):
            return ColumnCells.empty(len(blocks))
        taken = ColumnCells(
            self.answered[blocks],
            self.parts[blocks],
            self.contents[blocks],
            {name: values[blocks] for name, values in self.stats.items()},
        )
        return taken.only(blocks >= 0)

    def only(self, kept: np.ndarray) -> ColumnCells:
        """The same without the answers of blocks where ``kept`` (bool [B]) is false."""
        answered = self.answered & kept
        return ColumnCells(
            answered,
            np.where(answered[:, None], self.parts, 0).astype(np.uint8),
            np.where(answered[:, None], self.contents, 0).astype(np.uint8),
            {name: np.where(answered, values, 0) for name, values in self.stats.items()},
        )

    def with_answers(self, answers: Iterable[tuple[int, Cell | Answer]]) -> ColumnCells:
        """The same with (block, answer) added or replaced; taken one at a time, so a stream will do."""
        answered, parts, contents = self.answered.copy(), self.parts.copy(), self.contents.copy()
        stats = {name: values.copy() for name, values in self.stats.items()}
        for block, answer in answers:
            answered[block] = True
            parts[block], contents[block] = pack_digests([answer.part, answer.content])
            for name in answer.stats.keys() - stats.keys():
                stats[name] = np.zeros(len(self), np.int64)
            for name, values in stats.items():
                values[block] = answer.stats.get(name, 0)
        return ColumnCells(answered, parts, contents, stats)

    def to_columns(self, prefix: str) -> dict[str, pa.Array]:
        return {prefix + name: _to_arrow(values) for name, values in sorted(self._arrays.items())}

    @classmethod
    def from_table(cls, table: tables.StoredTable, prefix: str) -> ColumnCells:
        """Those that ``to_columns`` gave the table; nothing of them is decoded before it is asked for."""
        cells = cls.__new__(cls)
        cells._arrays = _StoredArrays(table, prefix)
        return cells

    def _told(self) -> dict[str, np.ndarray]:
        """All arrays that tell something; a statistic that is 0 everywhere does not."""
        return {name: values for name, values in self._arrays.items() if not name.startswith(_STATS) or values.any()}


class _StoredArrays(Mapping[str, np.ndarray]):
    """Arrays of a table, each decoded once."""

    def __init__(self, table: tables.StoredTable, prefix: str) -> None:
        self._table, self._prefix = table, prefix
        self._decoded: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._decoded:
            read = self._table.digests if name in _DIGESTS else self._table.values
            self._decoded[name] = read(self._prefix + name)
        return self._decoded[name]

    def __iter__(self) -> Iterator[str]:
        names = self._table.column_names
        return (name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _to_arrow(values: np.ndarray) -> pa.Array:
    return tables.from_digests(values) if values.ndim == 2 else pa.array(values)
