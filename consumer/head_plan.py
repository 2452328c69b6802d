"""How a head is applied to a few rows at a time: the constants of one call, and the sums of its gradients.

Shapes: T positions, R positions of one chunk (``rows``), D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_BYTES = {"cpu": 8 * 2**20}
"""Size of a chunk's logits by device type. On CPU they should stay in the cache between the passes over them (2 MiB and
all of 32 MiB each cost 15 % more), and more chunks are more barriers, which are dear where cores are shared."""

CHUNK_BYTES_ELSEWHERE = 256 * 2**20
"""The same on accelerators, where small chunks would leave the matrix units idle."""


@dataclass(frozen=True)
class HeadPlan:
    """How the head is applied: the constants of one call."""

    scale: float
    softcap: float | None
    temperature: float
    chunk_rows: int
    keep: bool
    compute_dtype: torch.dtype
    result_dtype: torch.dtype

    def chunks(self, num_rows: int) -> Iterator[slice]:
        for start in range(0, max(num_rows, 1), self.chunk_rows):  # no rows are one empty chunk
            yield slice(start, min(start + self.chunk_rows, num_rows))

    def logits(self, hidden_RD: Tensor, weight_VD: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """Logits of one chunk into ``out`` [R, V]."""
        if weight_VD.dtype == out.dtype:
            torch.mm(hidden_RD, weight_VD.T, out=out)
        else:
            out.copy_(hidden_RD @ weight_VD.T)
        if bias is not None:
            out.add_(bias)
        if self.softcap is not None:
            return out.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        return out if self.slope == 1.0 else out.mul_(self.slope)

    @property
    def slope(self) -> float:
        """Derivative of a logit by the product, but for the tanh of a softcap."""
        return self.scale / self.temperature

    def tanh_slope(self, logits_RV: Tensor) -> Tensor | None:
        """[R, V] derivative of the softcap's tanh at these logits, 1 - tanh^2."""
        if self.softcap is None:
            return None
        return logits_RV.mul(self.temperature / self.softcap).square_().neg_().add_(1.0)


class HeadGradients:
    """Gradients of hidden, head and bias, summed over chunks: in float32, for such sums outgrow a bf16 product."""

    def __init__(self, needed: tuple[bool, ...], hidden_TD: Tensor, head_VD: Tensor, plan: HeadPlan) -> None:
        self.hidden_TD = torch.empty_like(hidden_TD) if needed[0] else None
        self.head_VD = torch.zeros_like(head_VD, dtype=plan.result_dtype) if needed[1] else None
        self.bias_V = self._zeros(len(head_VD), hidden_TD, plan) if needed[2] else None

    @staticmethod
    def _zeros(size: int, like: Tensor, plan: HeadPlan) -> Tensor:
        return like.new_zeros(size, dtype=plan.result_dtype)

    def add(self, rows: slice, grad_RV: Tensor, hidden_RD: Tensor, weight_VD: Tensor) -> None:
        if self.bias_V is not None:
            self.bias_V += grad_RV.sum(0)
        grad_RV = grad_RV.to(weight_VD.dtype)
        if self.hidden_TD is not None:
            self.hidden_TD[rows] = grad_RV @ weight_VD
        if self.head_VD is not None and self.head_VD.dtype == weight_VD.dtype:
            self.head_VD.addmm_(grad_RV.T, hidden_RD)
        elif self.head_VD is not None:
            self.head_VD += grad_RV.T @ hidden_RD

    def result(self, head_VD: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_head = None if self.head_VD is None else self.head_VD.to(head_VD.dtype)
        grad_bias = None if self.bias_V is None or bias is None else self.bias_V.to(bias.dtype)
        return self.hidden_TD, grad_head, grad_bias


def compute_dtype(hidden_TD: Tensor, head_VD: Tensor) -> torch.dtype:
    """Dtype of the product: autocast's where it is on (it leaves float64 alone), else the inputs' own."""
    device = hidden_TD.device.type
    if torch.is_autocast_enabled(device) and hidden_TD.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    if hidden_TD.dtype != head_VD.dtype:
        raise ValueError(f"hidden is {hidden_TD.dtype}, head is {head_VD.dtype}: cast one of them, or use autocast")
    return hidden_TD.dtype
