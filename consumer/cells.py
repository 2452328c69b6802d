"""The ways to cut a vocabulary into K listed cells and a rest: by token, and by classes or projected tokens.

``primitive.py`` walks over chunks of rows; what a chunk's logits say about the cells, and the gradient back to the
logits, is here. Nothing is a difference of probabilities: the rest is summed by itself.

Shapes: T positions, R positions of one chunk (``rows``), V vocabulary, K listed ids, C cells there are.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from logitstore.consumer.cell_maps import CellMap, ClassMap

MASS_FLOOR = 1e-30
"""Least probability of a class, and of the rest beside classes. Class masses are sums of float32 probabilities, which
underflow near 1e-45; with the floor a class's value stays >= logsumexp - 69.1 nats, and the factor (mass / floor) on a
gradient through it is at most 1 and fades to zero. Plain tokens need no floor: they are never summed."""

NO_LOGIT = float("-inf")


class CellValues(NamedTuple):
    """Values of the cells, or the gradients that arrive at them, for one chunk."""

    logsumexp_R: Tensor
    gathered_RK: Tensor
    complement_R: Tensor


class SplitSoftmax(NamedTuple):
    """One chunk's distribution: a softmax over some entries, zero at the others, which stand beside it."""

    softmax_RV: Tensor
    log_norm_R: Tensor
    """logsumexp over what the softmax is over: its entries' logits are log(softmax) + this."""
    beside_ids_RK: Tensor | None
    beside_logits_RK: Tensor | None
    """The others, each once; -inf is fill."""


class Cells(Protocol):
    """Listed cells and a rest, for all T rows."""

    def softmax(self, rows: slice, logits_RV: Tensor, out: Tensor) -> Tensor:
        """Softmax that the gradient is made of, into ``out`` [R, V]; may overwrite the logits."""

    def measure(self, rows: slice, logits_RV: Tensor, softmax_RV: Tensor) -> CellValues:
        """Values of the cells; overwrites the logits, and ``softmax_RV`` with the softmax."""

    def split(self, rows: slice, softmax_RV: Tensor, values: CellValues) -> SplitSoftmax:
        """The distribution over the whole vocabulary, after ``measure`` or ``softmax``."""

    def gradient(self, rows: slice, softmax_RV: Tensor, values: CellValues, grads: CellValues, out: Tensor) -> None:
        """Write the gradient to the logits into ``out`` [R, V]; leaves ``softmax_RV`` as it is."""


class TokenCells:
    """Each listed id is a cell. The softmax is over the *unlisted* entries alone, zero at the listed ones.

    So the rest keeps full relative precision in value and gradient however small it is, and the listed entries, whose
    probabilities are exp(gathered - logsumexp), are K numbers by the side.

    Args:
        ids_TK: int64 in 0..V-1, or -1 for fill.
    """

    def __init__(self, ids_TK: Tensor) -> None:
        self.fill_TK = ids_TK < 0
        self.ids_TK = ids_TK.clamp(min=0)
        self.repeated_TK = _repeated(ids_TK) | self.fill_TK

    def _mask(self, rows: slice, logits_RV: Tensor) -> None:
        # Adding leaves the entry alone that fill is clamped to, and does nothing more to an id listed twice.
        minus_inf = torch.zeros_like(self.ids_TK[rows], dtype=logits_RV.dtype)
        logits_RV.scatter_add_(1, self.ids_TK[rows], minus_inf.masked_fill_(~self.fill_TK[rows], NO_LOGIT))

    def softmax(self, rows: slice, logits_RV: Tensor, out: Tensor) -> Tensor:
        self._mask(rows, logits_RV)
        torch.softmax(logits_RV, -1, out=out)
        if self.ids_TK.shape[1] >= logits_RV.shape[1]:  # only then can a row list everything, and its softmax be nan
            out.nan_to_num_(nan=0.0)
        return out

    def measure(self, rows: slice, logits_RV: Tensor, softmax_RV: Tensor) -> CellValues:
        gathered_RK = logits_RV.gather(1, self.ids_TK[rows]).masked_fill_(self.fill_TK[rows], NO_LOGIT)
        complement_R = _logsumexp(logits_RV, self.softmax(rows, logits_RV, softmax_RV))
        listed_R = gathered_RK.masked_fill(self.repeated_TK[rows], NO_LOGIT).logsumexp(-1)
        return CellValues(torch.logaddexp(complement_R, listed_R), gathered_RK, complement_R)

    def split(self, rows: slice, softmax_RV: Tensor, values: CellValues) -> SplitSoftmax:
        listed_RK = values.gathered_RK.masked_fill(self.repeated_TK[rows], NO_LOGIT)
        return SplitSoftmax(softmax_RV, values.complement_R, self.ids_TK[rows], listed_RK)

    def gradient(self, rows: slice, softmax_RV: Tensor, values: CellValues, grads: CellValues, out: Tensor) -> None:
        rest_R = torch.exp(values.complement_R - values.logsumexp_R)
        torch.mul(softmax_RV, (grads.complement_R + grads.logsumexp_R * rest_R)[:, None], out=out)
        listed_RK = torch.exp(values.gathered_RK - values.logsumexp_R[:, None]) * grads.logsumexp_R[:, None]
        listed_RK.masked_fill_(self.repeated_TK[rows], 0.0)
        listed_RK += grads.gathered_RK.masked_fill(self.fill_TK[rows], 0.0)
        out.scatter_add_(1, self.ids_TK[rows], listed_RK)


class MappedCells:
    """Each listed class, or token of another vocabulary, is a cell; the softmax is the whole vocabulary's.

    Args:
        ids_TK: int64 cells in 0..C-1, or -1 for fill.
        to_cells: where the vocabulary's mass goes.
    """

    def __init__(self, ids_TK: Tensor, to_cells: CellMap) -> None:
        self.to_cells = to_cells
        # Fill is sent to where mass without a cell goes, and never read back.
        self.none_TK = ids_TK < 0
        self.slots_TK = ids_TK.masked_fill(self.none_TK, to_cells.num_cells)
        num_listed_T = ids_TK.shape[1] - (_repeated(ids_TK) | self.none_TK).sum(-1)
        self.nothing_left_T = (num_listed_T >= to_cells.num_cells) & to_cells.covers_everything

    def softmax(self, rows: slice, logits_RV: Tensor, out: Tensor) -> Tensor:
        return torch.softmax(logits_RV, -1, out=out)

    def split(self, rows: slice, softmax_RV: Tensor, values: CellValues) -> SplitSoftmax:
        return SplitSoftmax(softmax_RV, values.logsumexp_R, None, None)

    def measure(self, rows: slice, logits_RV: Tensor, softmax_RV: Tensor) -> CellValues:
        slots_RK = self.slots_TK[rows]
        logsumexp_R = _logsumexp(logits_RV, self.softmax(rows, logits_RV, softmax_RV))
        mass_RC = self._masses(rows, softmax_RV)
        gathered_RK = mass_RC.gather(1, slots_RK).clamp_(min=MASS_FLOOR).log_().add_(logsumexp_R[:, None])
        # What fill points to is a part of the rest.
        listed_RC = torch.zeros_like(mass_RC, dtype=torch.bool).scatter_(1, slots_RK, True)
        listed_RC[:, -1] = False
        rest_R = mass_RC.masked_fill_(listed_RC, 0.0).sum(-1).clamp_(min=MASS_FLOOR)
        complement_R = rest_R.log_().add_(logsumexp_R).masked_fill_(self.nothing_left_T[rows], NO_LOGIT)
        return CellValues(logsumexp_R, gathered_RK.masked_fill_(self.none_TK[rows], NO_LOGIT), complement_R)

    def _masses(self, rows: slice, softmax_RV: Tensor) -> Tensor:
        return self.to_cells.push(softmax_RV)

    def gradient(self, rows: slice, softmax_RV: Tensor, values: CellValues, grads: CellValues, out: Tensor) -> None:
        slots_RK = self.slots_TK[rows]
        rest_R = torch.exp(values.logsumexp_R - values.complement_R) * grads.complement_R
        rest_R = rest_R.masked_fill(self.nothing_left_T[rows], 0.0)
        factor_RC = rest_R[:, None].repeat(1, self.to_cells.num_cells + 1)
        # Set, then add: subtracting the rest's factor, which may be 1e30, would lose the others.
        factor_RC.scatter_(1, slots_RK, 0.0)
        factor_RC[:, -1] = rest_R
        listed_RK = torch.exp(values.logsumexp_R[:, None] - values.gathered_RK) * grads.gathered_RK
        factor_RC.scatter_add_(1, slots_RK, listed_RK.masked_fill_(self.none_TK[rows], 0.0))
        torch.add(self.to_cells.pull(factor_RC), grads.logsumexp_R[:, None], out=out)
        out.mul_(softmax_RV)


class ClassesBesideRealised(MappedCells):
    """Classes of which the realised token is no part: it is in no cell and not in the rest, but a cell of its own.

    A listed class that has no other token has no logit.

    Args:
        ids_TK: int64 classes in 0..C-1, or -1 for fill.
        to_cells: the classes.
        realised_T: int64 vocabulary entry of each row, or -1 for none.
    """

    def __init__(self, ids_TK: Tensor, to_cells: ClassMap, realised_T: Tensor) -> None:
        super().__init__(ids_TK, to_cells)
        self.no_realised_T1 = realised_T[:, None] < 0
        self.realised_T1 = realised_T.clamp(min=0)[:, None]
        sizes = torch.bincount(to_cells.groups, minlength=to_cells.num_cells)
        class_T1 = to_cells.groups[self.realised_T1]
        is_alone_T1 = (sizes[class_T1] == 1) & ~self.no_realised_T1
        is_its_class_TK = self.slots_TK == class_T1
        num_listed_T = ids_TK.shape[1] - (_repeated(ids_TK) | self.none_TK).sum(-1)
        num_listed_T = num_listed_T + (is_alone_T1[:, 0] & ~is_its_class_TK.any(-1))
        self.nothing_left_T = num_listed_T >= to_cells.num_cells
        self.none_TK = self.none_TK | (is_its_class_TK & is_alone_T1)

    def _masses(self, rows: slice, softmax_RV: Tensor) -> Tensor:
        mass_R1 = softmax_RV.gather(1, self.realised_T1[rows])
        softmax_RV.scatter_(1, self.realised_T1[rows], mass_R1.where(self.no_realised_T1[rows], 0.0))
        mass_RC = self.to_cells.push(softmax_RV)
        softmax_RV.scatter_(1, self.realised_T1[rows], mass_R1)
        return mass_RC

    def gradient(self, rows: slice, softmax_RV: Tensor, values: CellValues, grads: CellValues, out: Tensor) -> None:
        super().gradient(rows, softmax_RV, values, grads, out)
        # The realised token is a part of the logsumexp alone.
        realised_R1 = softmax_RV.gather(1, self.realised_T1[rows]) * grads.logsumexp_R[:, None]
        realised_R1 = out.gather(1, self.realised_T1[rows]).where(self.no_realised_T1[rows], realised_R1)
        out.scatter_(1, self.realised_T1[rows], realised_R1)


def _logsumexp(logits_RV: Tensor, softmax_RV: Tensor) -> Tensor:
    """logsumexp from the softmax there already is: at the largest entry, logit - log(probability). -inf if all are."""
    top_R = logits_RV.amax(-1)
    return torch.where(torch.isinf(top_R), top_R, top_R - softmax_RV.amax(-1).log_())


def _repeated(ids_TK: Tensor) -> Tensor:
    """True at every occurrence of an id in its row but one."""
    sorted_TK, order_TK = ids_TK.sort(-1)
    same_TK = torch.zeros_like(ids_TK, dtype=torch.bool)
    same_TK[:, 1:] = sorted_TK[:, 1:] == sorted_TK[:, :-1]
    return torch.zeros_like(same_TK).scatter_(1, order_TK, same_TK)
