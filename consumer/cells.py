"""The two ways to cut a vocabulary into K listed cells and a rest: by token, and by class of tokens.

``primitive.py`` walks over chunks of rows; what a chunk's logits say about the cells, and the gradient back to the
logits, is here. Nothing is a difference of probabilities: the rest is summed by itself.

Shapes: T positions, R positions of one chunk (``rows``), V vocabulary, K listed ids, C classes.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

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


class Cells(Protocol):
    """Listed cells and a rest, for all T rows."""

    def softmax(self, rows: slice, logits_RV: Tensor, out: Tensor) -> Tensor:
        """Softmax that the gradient is made of, into ``out`` [R, V]; may overwrite the logits."""

    def measure(self, rows: slice, logits_RV: Tensor, softmax_RV: Tensor) -> CellValues:
        """Values of the cells; overwrites the logits, and ``softmax_RV`` with the softmax."""

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

    def gradient(self, rows: slice, softmax_RV: Tensor, values: CellValues, grads: CellValues, out: Tensor) -> None:
        rest_R = torch.exp(values.complement_R - values.logsumexp_R)
        torch.mul(softmax_RV, (grads.complement_R + grads.logsumexp_R * rest_R)[:, None], out=out)
        listed_RK = torch.exp(values.gathered_RK - values.logsumexp_R[:, None]) * grads.logsumexp_R[:, None]
        listed_RK.masked_fill_(self.repeated_TK[rows], 0.0)
        listed_RK += grads.gathered_RK.masked_fill(self.fill_TK[rows], 0.0)
        out.scatter_add_(1, self.ids_TK[rows], listed_RK)


class ClassCells:
    """Each listed class of vocabulary entries is a cell; the softmax is the whole vocabulary's.

    Args:
        ids_TK: int64 classes in 0..C-1, or -1 for fill.
        groups: int64 [V] the class of each entry.
        num_classes: C.
        apart_T: int64 [T] an entry of each row (-1 for none) that is counted in no cell: neither in its class nor in
            the rest. A class without any other entry has no logit.
    """

    def __init__(self, ids_TK: Tensor, groups: Tensor, num_classes: int, apart_T: Tensor | None = None) -> None:
        self.fill_TK = ids_TK < 0
        # Fill is sent to one more class, which no entry is in.
        self.slots_TK = ids_TK.masked_fill(self.fill_TK, num_classes)
        self.groups = groups
        self.num_classes = num_classes
        distinct_T = self.slots_TK.shape[1] - (_repeated(ids_TK) | self.fill_TK).sum(-1)
        self.none_TK = self.fill_TK
        self.apart_T1 = self.no_apart_T1 = None
        if apart_T is not None:
            self.no_apart_T1 = apart_T[:, None] < 0
            self.apart_T1 = apart_T.clamp(min=0)[:, None]
            is_alone_T1 = (torch.bincount(groups, minlength=num_classes) == 1)[groups][
                self.apart_T1
            ] & ~self.no_apart_T1
            is_its_class_TK = self.slots_TK == groups[self.apart_T1]
            self.none_TK = self.fill_TK | (is_its_class_TK & is_alone_T1)
            distinct_T = distinct_T + (is_alone_T1[:, 0] & ~is_its_class_TK.any(-1))
        self.nothing_left_T = distinct_T >= num_classes

    def softmax(self, rows: slice, logits_RV: Tensor, out: Tensor) -> Tensor:
        return torch.softmax(logits_RV, -1, out=out)

    def measure(self, rows: slice, logits_RV: Tensor, softmax_RV: Tensor) -> CellValues:
        slots_RK = self.slots_TK[rows]
        logsumexp_R = _logsumexp(logits_RV, self.softmax(rows, logits_RV, softmax_RV))
        mass_RC = softmax_RV.new_zeros((len(slots_RK), self.num_classes + 1))
        apart_R1 = self._take_apart(rows, softmax_RV)
        mass_RC.index_add_(1, self.groups, softmax_RV)
        self._put_back(rows, softmax_RV, apart_R1)
        gathered_RK = mass_RC.gather(1, slots_RK).clamp_(min=MASS_FLOOR).log_().add_(logsumexp_R[:, None])
        rest_R = mass_RC.scatter_(1, slots_RK, 0.0).sum(-1).clamp_(min=MASS_FLOOR)
        complement_R = rest_R.log_().add_(logsumexp_R).masked_fill_(self.nothing_left_T[rows], NO_LOGIT)
        return CellValues(logsumexp_R, gathered_RK.masked_fill_(self.none_TK[rows], NO_LOGIT), complement_R)

    def _take_apart(self, rows: slice, softmax_RV: Tensor) -> Tensor | None:
        """Set the softmax to zero at the entries that are in no cell, and return what it was there."""
        if self.apart_T1 is None or self.no_apart_T1 is None:
            return None
        apart_R1 = softmax_RV.gather(1, self.apart_T1[rows])
        softmax_RV.scatter_(1, self.apart_T1[rows], apart_R1.where(self.no_apart_T1[rows], 0.0))
        return apart_R1

    def _put_back(self, rows: slice, softmax_RV: Tensor, apart_R1: Tensor | None) -> None:
        if self.apart_T1 is not None and apart_R1 is not None:
            softmax_RV.scatter_(1, self.apart_T1[rows], apart_R1)

    def gradient(self, rows: slice, softmax_RV: Tensor, values: CellValues, grads: CellValues, out: Tensor) -> None:
        slots_RK = self.slots_TK[rows]
        rest_R = torch.exp(values.logsumexp_R - values.complement_R) * grads.complement_R
        rest_R = rest_R.masked_fill(self.nothing_left_T[rows], 0.0)
        factor_RC = (grads.logsumexp_R + rest_R)[:, None].repeat(1, self.num_classes + 1)
        # Set, then add: subtracting the rest's factor, which may be 1e30, would lose the others.
        factor_RC.scatter_(1, slots_RK, grads.logsumexp_R[:, None].expand(slots_RK.shape))
        listed_RK = torch.exp(values.logsumexp_R[:, None] - values.gathered_RK) * grads.gathered_RK
        factor_RC.scatter_add_(1, slots_RK, listed_RK.masked_fill_(self.none_TK[rows], 0.0))
        torch.mul(softmax_RV, factor_RC.index_select(1, self.groups), out=out)
        if self.apart_T1 is not None and self.no_apart_T1 is not None:
            # An entry in no cell is in the logsumexp alone.
            alone_R1 = softmax_RV.gather(1, self.apart_T1[rows]) * grads.logsumexp_R[:, None]
            alone_R1 = out.gather(1, self.apart_T1[rows]).where(self.no_apart_T1[rows], alone_R1)
            out.scatter_(1, self.apart_T1[rows], alone_R1)


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
