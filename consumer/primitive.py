"""The one primitive under every objective: what a loss on {listed tokens, rest} needs of the student's head.

Cross-entropy on full logits keeps three arrays of size [T, V]. Every divergence on a stored row needs only the
logsumexp, the logits at the listed ids and the logsumexp of everything else, so the head is applied to a few rows at a
time, in buffers that stay in cache, and the backward pass forms the chunk's logits again. Below ``KEEP_BYTES`` the
softmax of the forward pass is kept instead, which spares one of four matrix products.

Shapes: T positions, R positions of one chunk (``rows``), D hidden size, V vocabulary, K listed ids.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from logitstore.consumer.cell_maps import ClassMap, SparseProjection
from logitstore.consumer.cells import Cells, CellValues, ClassesBesideRealised, MappedCells, TokenCells
from logitstore.consumer.head_plan import CHUNK_BYTES, CHUNK_BYTES_ELSEWHERE, HeadGradients, HeadPlan, compute_dtype
from logitstore.consumer.readings import OneLogit, Reading, SubsetSums, TopLogits

KEEP_BYTES = 128 * 2**20
"""Up to this size of [T, V] its softmax is kept for the backward pass: a third of what cross-entropy on full logits
holds at its peak, for 15 % less time than forming the logits again (one core, T=2048, D=192, V=4096, K=24)."""


class HeadOutputs(NamedTuple):
    """What the head says about the listed ids; float32 (float64 for float64 inputs), nats, all at one temperature."""

    logsumexp_T: Tensor
    """[T] logsumexp over the whole vocabulary."""
    gathered_TK: Tensor
    """[T, K] logits at the ids (with ``groups``: logsumexp over each listed class; with ``projection``: log mass of
    each listed cell + logsumexp); -inf where the id is -1."""
    complement_T: Tensor
    """[T] logsumexp over what is not listed; -inf, without gradient, where everything is listed."""
    realised_T: Tensor | None = None
    """[T] logits at ``realised_T``, where that was given; -inf where it is -1."""
    subsets_TG: Tensor | None = None
    """[T, G] logsumexp over each of ``subsets_GV``, where they were given; -inf, without gradient, for an empty one."""
    top_TM: Tensor | None = None
    """[T, M] largest logits in descending order, where ``num_top`` was given; -inf after the last there is."""


def head_outputs(
    hidden_TD: Tensor,
    head_VD: Tensor,
    ids_TK: Tensor,
    *,
    groups: Tensor | None = None,
    num_groups: int | None = None,
    realised_T: Tensor | None = None,
    realised_cell: bool = False,
    projection: SparseProjection | None = None,
    subsets_GV: Tensor | None = None,
    num_top: int | None = None,
    top_among_V: Tensor | None = None,
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
        subsets_TG = (logits[:, None] + log(subsets_GV)).logsumexp(-1)
        top_TM = logits.scatter(-1, ids_TK, -inf).topk(num_top).values

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
        projection: W, from the V entries to C tokens of another vocabulary. Then ``ids_TK`` are such tokens, whose
            masses are sum_s softmax(s) W[s, id], and the complement is all other mass, whether it has a token there or
            none. Floored like classes. Not with ``groups``.
        subsets_GV: [G, V] bool, a few fixed subsets of the vocabulary. Their probabilities are floored like classes'.
        num_top: M, how many of the largest logits to return: of the entries that are not listed, or of all with
            ``groups`` or ``projection``. Of equal logits that of the lowest id comes first, and gets the gradient.
        top_among_V: [V] bool, the entries that ``num_top`` is about; default all.
        bias: [V] added to the product.
        softcap: Gemma's bound on the absolute logit.
        scale: factor on the product (Cohere's ``logit_scale``, one over Granite's ``logits_scaling``).
        temperature: divides the logits, after the softcap.
        chunk_rows: positions per chunk; by default the chunk's logits take ``CHUNK_BYTES``.

    Raises:
        ValueError: shapes, dtypes or constants that do not fit together.
    """
    for name, constant in (
        ("temperature", temperature),
        ("softcap", softcap),
        ("chunk_rows", chunk_rows),
        ("num_top", num_top),
    ):
        if constant is not None and constant <= 0:
            raise ValueError(f"{name} is {constant}, expected a positive number")
    if realised_cell and (groups is None or realised_T is None):
        raise ValueError("realised_cell needs groups and realised_T: a listed token is a cell of its own without it")
    inputs = {
        "head": (head_VD, "VD"),
        "bias": (bias, "V"),
        "groups": (groups, "V"),
        "ids": (ids_TK, "TK"),
        "realised": (realised_T, "T"),
        "subsets": (subsets_GV, "GV"),
        "top_among": (top_among_V, "V"),
    }
    _check_inputs(hidden_TD, inputs)
    product_dtype = compute_dtype(hidden_TD, head_VD)
    result_dtype = torch.float64 if product_dtype == torch.float64 else torch.float32
    row_bytes = max(len(head_VD), projection.num_cells if projection else 0) * result_dtype.itemsize
    chunk_bytes = CHUNK_BYTES.get(hidden_TD.device.type, CHUNK_BYTES_ELSEWHERE)
    plan = HeadPlan(
        scale=scale,
        softcap=softcap,
        temperature=temperature,
        chunk_rows=max(1, min(chunk_rows or max(16, chunk_bytes // row_bytes), len(hidden_TD))),
        keep=torch.is_grad_enabled() and softcap is None and hidden_TD.shape[0] * row_bytes <= KEEP_BYTES,
        compute_dtype=product_dtype,
        result_dtype=result_dtype,
    )
    cells = _cells(ids_TK, groups, num_groups, realised_T if realised_cell else None, projection, len(head_VD))
    readings: dict[str, Reading] = {}
    if realised_T is not None:
        readings["realised_T"] = OneLogit(realised_T)
    if subsets_GV is not None:
        readings["subsets_TG"] = SubsetSums(subsets_GV)
    if num_top is not None:
        listed_TK = ids_TK if isinstance(cells, TokenCells) else None
        readings["top_TM"] = TopLogits(len(hidden_TD), num_top, listed_TK, top_among_V, ids_TK.device)
    values = _Head.apply(hidden_TD, head_VD, bias, cells, tuple(readings.values()), plan)
    return HeadOutputs(*values[:3], **dict(zip(readings, values[3:], strict=True)))


def _cells(
    ids_TK: Tensor,
    groups: Tensor | None,
    num_groups: int | None,
    apart_T: Tensor | None,
    projection: SparseProjection | None,
    vocabulary: int,
) -> Cells:
    if projection is not None:
        if groups is not None or apart_T is not None:
            raise ValueError("projection is given with groups or realised_cell, expected one way to cut the vocabulary")
        if projection.num_entries != vocabulary:
            raise ValueError(f"projection is of {projection.num_entries} entries, expected V={vocabulary}")
        return MappedCells(ids_TK, projection)
    if groups is None:
        return TokenCells(ids_TK)
    classes = ClassMap(groups, num_groups or int(groups.max()) + 1)
    return MappedCells(ids_TK, classes) if apart_T is None else ClassesBesideRealised(ids_TK, classes, apart_T)


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
        dtype = torch.bool if name in ("subsets", "top_among") else torch.int64
        if name not in ("head", "bias") and tensor.dtype != dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected {dtype}")


class _Head(torch.autograd.Function):
    """The two walks over chunks of rows."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        head_VD: Tensor,
        bias: Tensor | None,
        cells: Cells,
        readings: tuple[Reading, ...],
        plan: HeadPlan,
    ) -> tuple[Tensor, ...]:
        num_rows, vocabulary = len(hidden_TD), len(head_VD)
        buffer_RV = hidden_TD.new_empty((plan.chunk_rows, vocabulary), dtype=plan.result_dtype)
        softmax_TV = buffer_RV.new_empty((num_rows if plan.keep else plan.chunk_rows, vocabulary))
        chunks = []
        with torch.autocast(hidden_TD.device.type, enabled=False):
            weight_VD = head_VD.to(plan.compute_dtype)
            for rows in plan.chunks(num_rows):
                size = rows.stop - rows.start
                logits_RV = plan.logits(hidden_TD[rows].to(plan.compute_dtype), weight_VD, bias, buffer_RV[:size])
                read = [reading.read(rows, logits_RV) for reading in readings]
                measured = cells.measure(rows, logits_RV, softmax_TV[rows] if plan.keep else softmax_TV[:size])
                chunks.append((*measured, *read))
        values = tuple(torch.cat(parts) for parts in zip(*chunks, strict=True))
        ctx.plan, ctx.cells, ctx.readings = plan, cells, readings
        ctx.save_for_backward(hidden_TD, head_VD, bias, softmax_TV if plan.keep else None, *values)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        plan, cells = ctx.plan, ctx.cells
        scaled = [grad * plan.slope for grad in grads]
        hidden_TD, head_VD, bias, kept_TV, *values = ctx.saved_tensors
        sums = HeadGradients(ctx.needs_input_grad, hidden_TD, head_VD, plan)
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
                chunk, chunk_grads = [x[rows] for x in values], [x[rows] for x in scaled]
                cell_values = CellValues(*chunk[:3])
                cells.gradient(rows, softmax_RV, cell_values, CellValues(*chunk_grads[:3]), grad_RV)
                split = cells.split(rows, softmax_RV, cell_values)
                for reading, value, grad in zip(ctx.readings, chunk[3:], chunk_grads[3:], strict=True):
                    reading.gradient(rows, split, value, grad, grad_RV)
                if tanh_slope_RV is not None:
                    grad_RV.mul_(tanh_slope_RV)
                sums.add(rows, grad_RV, hidden_RD, weight_VD)
        return *sums.result(head_VD, bias), None, None, None
