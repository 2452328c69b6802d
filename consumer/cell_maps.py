"""Which cells the mass of a vocabulary entry goes to: one class each, or a weighted few.

Shapes: R rows, V vocabulary, C cells (and one more, for mass that has no cell), E entries of a sparse map.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from logitstore.token_projection import TokenProjection

WEIGHT_TOLERANCE = 1e-4
"""A row of a projection whose sum is within this of 1 is meant to sum to 1: weights may be rounded."""


class CellMap(Protocol):
    """A non-negative linear map from V entries to C cells."""

    @property
    def num_cells(self) -> int:
        """C, without the one for mass that has no cell."""

    @property
    def covers_everything(self) -> bool:
        """Whether all mass goes to the C cells."""

    def push(self, mass_RV: Tensor) -> Tensor:
        """[R, C + 1] the mass of each cell; the last is of entries (or parts of them) that have none."""

    def pull(self, factor_RC: Tensor) -> Tensor:
        """[R, V] the transposed map, of C + 1 cells: the weighted sum over each entry's cells."""


@dataclass(frozen=True)
class ClassMap:
    """Each entry belongs to one class."""

    groups: Tensor
    """[V] int64 in 0..C-1."""
    num_cells: int
    covers_everything = True

    def push(self, mass_RV: Tensor) -> Tensor:
        mass_RC = mass_RV.new_zeros((len(mass_RV), self.num_cells + 1))
        return mass_RC.index_add_(1, self.groups, mass_RV)

    def pull(self, factor_RC: Tensor) -> Tensor:
        return factor_RC.index_select(1, self.groups)


@dataclass(frozen=True)
class SparseProjection:
    """Each entry's mass is spread over a few tokens of another vocabulary: a sparse row-stochastic matrix W [V, C].

    What a row lacks to 1 (all of it for an entry without an image) goes to no cell, and so to the rest.
    """

    source_E: Tensor
    """[E] int64 entry of the vocabulary, ascending."""
    cell_E: Tensor
    """[E] int64 cell, 0..C; C is none."""
    weight_E: Tensor
    """[E] float, positive."""
    num_entries: int
    """V."""
    num_cells: int
    """C."""
    covers_everything: bool
    """Whether every row sums to 1."""

    @classmethod
    def from_csr(
        cls, offsets: Tensor, cells: Tensor, weights: Tensor, num_cells: int, num_entries: int | None = None
    ) -> SparseProjection:
        """Take a CSR matrix, and add what each row lacks to 1.

        Args:
            offsets: [V + 1] integer, where each row begins.
            cells: [E] integer columns, 0..C-1.
            weights: [E] floating, >= 0.
            num_cells: C.
            num_entries: rows of the student's head, where it is wider than the vocabulary; padding has no image.

        Raises:
            ValueError: arrays that are no CSR matrix with rows summing to at most 1.
        """
        source_E = _check_csr(offsets, cells, weights, num_cells)
        num_entries = len(offsets) - 1 if num_entries is None else num_entries
        if num_entries < len(offsets) - 1:
            raise ValueError(f"projection has {len(offsets) - 1} rows, but the head only {num_entries}")
        sums_V = torch.zeros(num_entries, dtype=torch.float64, device=source_E.device)
        sums_V.index_add_(0, source_E, weights.double())
        if float(sums_V.max()) > 1.0 + WEIGHT_TOLERANCE:
            raise ValueError(
                f"projection: row {int(sums_V.argmax())} sums to {float(sums_V.max()):.6g}, expected at most 1"
            )
        # Rows that were meant to sum to 1 do so exactly, for else the divergence would be off by the difference.
        is_whole_V = sums_V > 1.0 - WEIGHT_TOLERANCE
        weight_E = weights / sums_V.where(is_whole_V, 1.0)[source_E]
        lacks = (~is_whole_V).nonzero()[:, 0]
        source_E, order_E = torch.cat([source_E, lacks]).sort(stable=True)
        cell_E = torch.cat([cells.long(), torch.full_like(lacks, num_cells)])[order_E]
        weight_E = torch.cat([weight_E, 1.0 - sums_V[lacks]])[order_E]
        return cls(source_E, cell_E, weight_E.to(weights.dtype), num_entries, num_cells, not len(lacks))

    @classmethod
    def of_tokens(cls, projection: TokenProjection, num_cells: int, num_entries: int) -> SparseProjection:
        """W for a head of ``num_entries`` rows, from the weights by which student tokens stand for teacher tokens.

        Args:
            projection: ``VocabularyMaps.student_to_teacher``.
            num_cells: C, teacher tokens.
            num_entries: V, rows of the student's head.
        """
        # Copied, for the arrays are read-only.
        offsets, cells, weights = map(torch.tensor, (projection.indptr, projection.ids, projection.weights))
        return cls.from_csr(offsets, cells, weights, num_cells, num_entries)

    def to(self, device: torch.device | str) -> SparseProjection:
        """The same on another device."""
        tensors = {name: getattr(self, name).to(device) for name in ("source_E", "cell_E", "weight_E")}
        return replace(self, **tensors)

    def reachable(self) -> Tensor:
        """[C] bool: cells that some entry gives mass to."""
        reached = torch.zeros(self.num_cells + 1, dtype=torch.bool, device=self.cell_E.device)
        reached[self.cell_E[self.weight_E > 0]] = True
        return reached[:-1]

    def push(self, mass_RV: Tensor) -> Tensor:
        mass_RC = mass_RV.new_zeros((len(mass_RV), self.num_cells + 1))
        return mass_RC.index_add_(1, self.cell_E, mass_RV.index_select(1, self.source_E).mul_(self.weight_E))

    def pull(self, factor_RC: Tensor) -> Tensor:
        factor_RV = factor_RC.new_zeros((len(factor_RC), self.num_entries))
        return factor_RV.index_add_(1, self.source_E, factor_RC.index_select(1, self.cell_E).mul_(self.weight_E))


def _check_csr(offsets: Tensor, cells: Tensor, weights: Tensor, num_cells: int) -> Tensor:
    """[E] the row of each entry of a CSR matrix."""
    sizes = offsets.diff().long()
    if not (len(cells) == len(weights) == int(offsets[-1])) or int(offsets[0]) != 0 or bool((sizes < 0).any()):
        raise ValueError(
            f"projection: offsets {int(offsets[0])}..{int(offsets[-1])} do not ascend from 0 to the number of entries, "
            f"of which there are {len(cells)} cells and {len(weights)} weights"
        )
    if len(cells) and not (int(cells.min()) >= 0 and int(cells.max()) < num_cells and float(weights.min()) >= 0.0):
        raise ValueError(f"projection: expected cells in 0..{num_cells - 1} and weights >= 0")
    return torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
