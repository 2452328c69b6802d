"""The one primitive under every objective: what a loss on {listed tokens, rest} needs of the student's head.

Cross-entropy on full logits keeps three arrays of size [T, V]. Every divergence on a stored row needs only the
logsumexp, the logits at the listed ids and the logsumexp of everything else, so the head is applied to a few rows at a
time, in buffers that stay in cache, and the backward pass forms the chunk's logits again. Below ``KEEP_BYTES`` the
softmax of the forward pass is kept instead, which spares one of four matrix products.

Shapes: T positions, R positions of one chunk (``rows``), D hidden size, V vocabulary, K listed ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from logitstore.consumer.cells import NO_LOGIT, Cells, CellValues, ClassCells, TokenCells

KEEP_BYTES = 128 * 2**20
"""Up to this size of [T, V] its softmax is kept for the backward pass: a third of what cross-entropy on full logits
holds at its peak, for 15 % less time than forming the logits again (one core, T=2048, D=192, V=4096, K=24)."""

CHUNK_BYTES = {"cpu": 8 * 2**20}
"""Size of a chunk's logits by device type. On CPU they should stay in the cache between the passes over them (2 MiB and
all of 32 MiB each cost 15 % more), and more chunks are more barriers, which are dear where cores are shared."""

CHUNK_BYTES_ELSEWHERE = 256 * 2**20
"""The same on accelerators, where small chunks would leave the matrix units idle."""


class HeadOutputs(NamedTuple):
    """What the head says about the listed ids; float32 (float64 for float64 inputs), nats, all at one temperature."""

    logsumexp_T: Tensor
    """[T] logsumexp over the whole vocabulary."""
    gathered_TK: Tensor
    """[T, K] logits at the ids (with ``groups``: logsumexp over each listed class); -inf where the id is -1."""
    complement_T: Tensor
    """[T] logsumexp over what is not listed; -inf, without gradient, where everything is listed."""
    realised_T: Tensor | None = None
    """[T] logits at ``realised_T``, where that was given; -inf where it is -1."""


def head_outputs(
    hidden_TD: Tensor,
    head_VD: Tensor,
    ids_TK: Tensor,
    *,
    groups: Tensor | None = None,
    num_groups: int | None = None,
    realised_T: Tensor | None = None,
    realised_cell: bool = False,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    temperature: float = 1.0,
    chunk_rows: int | None = None,
) -> HeadOutputs:
    """Apply a language-model head and keep only what divergences on {listed ids, rest} need.

    Equals, without keeping anything of size [T, V] beyond ``KEEP_BYTES``::

        logits = (hidden_TD @ head_VD.T).float() + bias
        logits = softcap * tanh(scale * logits / softcap) / temperature
        logsumexp_T = logits.logsumexp(-1)
        gathered_TK = logits.gather(-1, ids_TK)
        complement_T = logits.scatter(-1, ids_TK, -inf).logsumexp(-1)
        realised_T = logits.gather(-1, realised_T[:, None])[:, 0]

    The product is computed in the inputs' dtype (under autocast in its dtype), everything after it in float32. The
    complement is summed by itself, so it is right however small it is. Gradients flow to ``hidden_TD``, ``head_VD`` and
    ``bias``, once (no double backward).

    Args:
        hidden_TD: [T, D] final hidden states, floating.
        head_VD: [V, D] the head's weight, a plain tensor of the dtype of ``hidden_TD`` (any, under autocast).
        ids_TK: [T, K] int64 ids in 0..V-1, or -1 for fill. An id listed twice counts once in the complement.
        groups: [V] int64 class of each vocabulary entry, in 0..C-1. Then ``ids_TK`` are classes, ``gathered_TK`` is the
            logsumexp over each class, and the complement is over the entries in no listed class. Probabilities of
            classes are floored at ``cells.MASS_FLOOR``.
        num_groups: C; found from ``groups`` if not given, at the price of a device synchronisation.
        realised_T: [T] int64 vocabulary entries (-1 for none) whose own logits are returned too: the realised tokens,
            for cross-entropy beside a loss on classes.
        realised_cell: the realised token is a cell of its own: it is left out of its class in ``gathered_TK`` (-inf if
            the class has no other token) and out of the complement, which are summed without it. Needs ``groups``
            and ``realised_T``; -1 there leaves the row's classes whole.
        bias: [V] added to the product.
        softcap: Gemma's bound on the absolute logit.
        scale: factor on the product (Cohere's ``logit_scale``, one over Granite's ``logits_scaling``).
        temperature: divides the logits, after the softcap.
        chunk_rows: positions per chunk; by default the chunk's logits take ``CHUNK_BYTES``.

    Raises:
        ValueError: shapes, dtypes or constants that do not fit together.
    """
    for name, constant in (("temperature", temperature), ("softcap", softcap), ("chunk_rows", chunk_rows)):
        if constant is not None and constant <= 0:
            raise ValueError(f"{name} is {constant}, expected a positive number")
    if realised_cell and (groups is None or realised_T is None):
        raise ValueError("realised_cell needs groups and realised_T: a listed token is a cell of its own without it")
    _check_inputs(hidden_TD, {"head": (head_VD, "VD"), "bias": (bias, "V"), "groups": (groups, "V"),
                              "ids": (ids_TK, "TK"), "realised": (realised_T, "T")})  # fmt: skip
    compute_dtype = _compute_dtype(hidden_TD, head_VD)
    result_dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
    row_bytes = head_VD.shape[0] * result_dtype.itemsize
    chunk_bytes = CHUNK_BYTES.get(hidden_TD.device.type, CHUNK_BYTES_ELSEWHERE)
    plan = _Plan(
        scale=scale,
        softcap=softcap,
        temperature=temperature,
        chunk_rows=max(1, min(chunk_rows or max(16, chunk_bytes // row_bytes), len(hidden_TD))),
        keep=torch.is_grad_enabled() and softcap is None and len(hidden_TD) * row_bytes <= KEEP_BYTES,
        compute_dtype=compute_dtype,
        result_dtype=result_dtype,
    )
    cells: Cells = TokenCells(ids_TK)
    if groups is not None:
        apart_T = realised_T if realised_cell else None
        cells = ClassCells(ids_TK, groups, num_groups or int(groups.max()) + 1, apart_T)
    return HeadOutputs(*_Head.apply(hidden_TD, head_VD, bias, cells, realised_T, plan))


def _check_inputs(hidden_TD: Tensor, inputs: dict[str, tuple[Tensor | None, str]]) -> None:
    if hidden_TD.dim() != 2:
        raise ValueError(f"hidden has shape {tuple(hidden_TD.shape)}, expected two dimensions: [T, D]")
    sizes = {"T": hidden_TD.shape[0], "D": hidden_TD.shape[1]}
    for name, (tensor, letters) in inputs.items():
        if tensor is None:
            continue
        found = tuple(tensor.shape)
        expected = ", ".join(f"{letter}={sizes[letter]}" if letter in sizes else letter for letter in letters)
        if len(found) != len(letters) or any(sizes.setdefault(a, n) != n for a, n in zip(letters, found, strict=True)):
            raise ValueError(f"{name} has shape {found}, expected [{expected}]")
        if name not in ("head", "bias") and tensor.dtype != torch.int64:
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected torch.int64")


def _compute_dtype(hidden_TD: Tensor, head_VD: Tensor) -> torch.dtype:
    """Dtype of the product: autocast's where it is on (it leaves float64 alone), else the inputs' own."""
    device = hidden_TD.device.type
    if torch.is_autocast_enabled(device) and hidden_TD.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    if hidden_TD.dtype != head_VD.dtype:
        raise ValueError(f"hidden is {hidden_TD.dtype}, head is {head_VD.dtype}: cast one of them, or use autocast")
    return hidden_TD.dtype


@dataclass(frozen=True)
class _Plan:
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


class _Head(torch.autograd.Function):
    """The two walks over chunks of rows."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        head_VD: Tensor,
        bias: Tensor | None,
        cells: Cells,
        realised_T: Tensor | None,
        plan: _Plan,
    ) -> tuple[Tensor | None, ...]:
        num_rows, vocabulary = len(hidden_TD), len(head_VD)
        buffer_RV = hidden_TD.new_empty((plan.chunk_rows, vocabulary), dtype=plan.result_dtype)
        softmax_TV = buffer_RV.new_empty((num_rows if plan.keep else plan.chunk_rows, vocabulary))
        chunks, realised = [], []
        with torch.autocast(hidden_TD.device.type, enabled=False):
            weight_VD = head_VD.to(plan.compute_dtype)
            for rows in plan.chunks(num_rows):
                size = rows.stop - rows.start
                logits_RV = plan.logits(hidden_TD[rows].to(plan.compute_dtype), weight_VD, bias, buffer_RV[:size])
                if realised_T is not None:
                    realised.append(_pick(logits_RV, realised_T[rows]))
                chunks.append(cells.measure(rows, logits_RV, softmax_TV[rows] if plan.keep else softmax_TV[:size]))
        values = CellValues(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))
        ctx.plan, ctx.cells, ctx.realised_T = plan, cells, realised_T
        ctx.save_for_backward(hidden_TD, head_VD, bias, softmax_TV if plan.keep else None, *values)
        return *values, torch.cat(realised) if realised else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        plan, cells, realised_T = ctx.plan, ctx.cells, ctx.realised_T
        scaled: list[Any] = [None if grad is None else grad * plan.slope for grad in grads]
        realised_grad_T = scaled.pop()
        hidden_TD, head_VD, bias, kept_TV, *values = ctx.saved_tensors
        sums = _Gradients(ctx.needs_input_grad, hidden_TD, head_VD, plan)
        buffer_RV = hidden_TD.new_empty((plan.chunk_rows, len(head_VD)), dtype=plan.result_dtype)
        again_RV = torch.empty_like(buffer_RV) if kept_TV is None else buffer_RV
        with torch.autocast(hidden_TD.device.type, enabled=False):
            weight_VD = head_VD.to(plan.compute_dtype)
            for rows in plan.chunks(len(hidden_TD)):
                grad_RV, hidden_RD = buffer_RV[: rows.stop - rows.start], hidden_TD[rows].to(plan.compute_dtype)
                tanh_slope_RV = None
                if kept_TV is None:
                    logits_RV = plan.logits(hidden_RD, weight_VD, bias, grad_RV)
                    tanh_slope_RV = plan.tanh_slope(logits_RV)
                    softmax_RV = cells.softmax(rows, logits_RV, again_RV[: len(grad_RV)])
                else:
                    softmax_RV = kept_TV[rows]
                chunk_values, chunk_grads = (CellValues(*(x[rows] for x in part)) for part in (values, scaled))
                cells.gradient(rows, softmax_RV, chunk_values, chunk_grads, grad_RV)
                if realised_T is not None:
                    _put(grad_RV, realised_T[rows], realised_grad_T[rows])
                if tanh_slope_RV is not None:
                    grad_RV.mul_(tanh_slope_RV)
                sums.add(rows, grad_RV, hidden_RD, weight_VD)
        return *sums.result(head_VD, bias), None, None, None


class _Gradients:
    """Gradients of hidden, head and bias, summed over chunks: in float32, for such sums outgrow a bf16 product."""

    def __init__(self, needed: tuple[bool, ...], hidden_TD: Tensor, head_VD: Tensor, plan: _Plan) -> None:
        self.hidden_TD = torch.empty_like(hidden_TD) if needed[0] else None
        self.head_VD = torch.zeros_like(head_VD, dtype=plan.result_dtype) if needed[1] else None
        self.bias_V = self._zeros(len(head_VD), hidden_TD, plan) if needed[2] else None

    @staticmethod
    def _zeros(size: int, like: Tensor, plan: _Plan) -> Tensor:
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


def _pick(logits_RV: Tensor, index_R: Tensor) -> Tensor:
    """Logit at one entry of each row; -inf where the index is -1."""
    return logits_RV.gather(1, index_R.clamp(min=0)[:, None])[:, 0].masked_fill_(index_R < 0, NO_LOGIT)


def _put(grad_RV: Tensor, index_R: Tensor, grad_R: Tensor) -> None:
    """Gradient of ``_pick``, added."""
    grad_RV.scatter_add_(1, index_R.clamp(min=0)[:, None], grad_R.masked_fill(index_R < 0, 0.0)[:, None])
