"""The primitive's definition, in float64 and with [T, V] arrays, and a comparison with it.

Shapes: T positions, D hidden size, V vocabulary, K listed ids, C classes, M largest logits, G subsets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from logitstore.consumer.cell_maps import SparseProjection
from logitstore.consumer.primitive import HeadOutputs, head_outputs

T, V, D, C = 252, 507, 123, 71
"""Odd sizes, so that no chunk is full and no axis is another's."""


def dense_outputs(
    hidden_TD: Tensor,
    head_VD: Tensor,
    ids_TK: Tensor,
    *,
    groups: Tensor | None = None,
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
    **_: Any,
) -> HeadOutputs:
    """The definition, in float64 and with [T, V] arrays."""
    logits_TV = hidden_TD.double() @ head_VD.double().T
    if bias is not None:
        logits_TV = logits_TV + bias.double()
    logits_TV = logits_TV * scale
    if softcap is not None:
        logits_TV = softcap * torch.tanh(logits_TV / softcap)
    logits_TV = logits_TV / temperature
    cells_TC = logits_TV
    if groups is not None:
        others_TV = logits_TV
        if realised_cell and realised_T is not None:
            is_realised_TV = torch.arange(logits_TV.shape[1]) == realised_T[:, None]
            others_TV = logits_TV.masked_fill(is_realised_TV, -math.inf)
        cells_TC = torch.stack([others_TV[:, groups == c].logsumexp(-1) for c in range(int(groups.max()) + 1)], -1)
    if projection is not None:
        mass_TC = torch.softmax(logits_TV, -1) @ dense_projection(projection)
        cells_TC = log_or_none(mass_TC) + logits_TV.logsumexp(-1, keepdim=True)
    # One more cell, of no mass, takes the fill.
    cells_TC = torch.nn.functional.pad(cells_TC, (0, 1), value=-math.inf)
    num_cells = cells_TC.shape[1] - 1
    slots_TK = ids_TK.masked_fill(ids_TK < 0, num_cells)
    gathered_TK = cells_TC.gather(1, slots_TK)
    if projection is not None:
        lost_V = torch.zeros(projection.num_entries, dtype=torch.float64)
        has_none_E = projection.cell_E == projection.num_cells
        lost_V[projection.source_E[has_none_E]] = projection.weight_E[has_none_E].double()
        lost_T = torch.softmax(logits_TV, -1) @ lost_V
        cells_TC = torch.cat([cells_TC, (log_or_none(lost_T) + logits_TV.logsumexp(-1))[:, None]], -1)
    complement_T = cells_TC.scatter(1, slots_TK, -math.inf).logsumexp(-1)
    realised = None
    if realised_T is not None:
        realised = logits_TV.gather(1, realised_T.clamp(min=0)[:, None])[:, 0].masked_fill(realised_T < 0, -math.inf)
    subsets, top = None, None
    if subsets_GV is not None:
        subsets = torch.stack([logits_TV[:, subset].logsumexp(-1) for subset in subsets_GV], -1)
    if num_top is not None:
        listed_TK = ids_TK if groups is None and projection is None else ids_TK[:, :0]
        top = dense_top(logits_TV, num_top, listed_TK, top_among_V)
    return HeadOutputs(logits_TV.logsumexp(-1), gathered_TK, complement_T, realised, subsets, top)


def log_or_none(mass: Tensor) -> Tensor:
    """The logarithm, and -inf without gradient at 0."""
    return mass.where(mass > 0, 1.0).log().masked_fill(mass == 0, -math.inf)


def dense_projection(projection: SparseProjection) -> Tensor:
    """[V, C] float64, without the column of mass that has no cell."""
    dense_VC = torch.zeros(projection.num_entries, projection.num_cells + 1, dtype=torch.float64)
    dense_VC.index_put_((projection.source_E, projection.cell_E), projection.weight_E.double(), accumulate=True)
    return dense_VC[:, :-1]


def dense_top(logits_TV: Tensor, num_top: int, listed_TK: Tensor, among_V: Tensor | None) -> Tensor:
    allowed_TV = torch.ones_like(logits_TV, dtype=torch.bool) if among_V is None else among_V.expand_as(logits_TV)
    allowed_TV = torch.nn.functional.pad(allowed_TV, (0, 1)).scatter(
        1, listed_TK.masked_fill(listed_TK < 0, logits_TV.shape[1]), False
    )
    candidates_TV = logits_TV.masked_fill(~allowed_TV[:, :-1], -math.inf)
    candidates_TV = torch.nn.functional.pad(candidates_TV, (0, num_top), value=-math.inf)
    return candidates_TV.sort(dim=-1, descending=True, stable=True).values[:, :num_top]


def problem(num_ids: int, *, num_cells: int = V, fill: bool = False, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden_TD = torch.randn(T, D, generator=generator)
    head_VD = torch.randn(V, D, generator=generator) * 0.3
    ids_TK = torch.rand(T, num_cells, generator=generator).topk(num_ids, -1).indices
    if fill:
        ids_TK = ids_TK.masked_fill(torch.rand(ids_TK.shape, generator=generator) < 0.4, -1)
        ids_TK[3] = -1
    return hidden_TD, head_VD, ids_TK


def weigh(outputs: HeadOutputs) -> Tensor:
    """A scalar that touches every finite output with another weight."""
    total = torch.zeros((), dtype=torch.float64)
    for index, value in enumerate(outputs):
        if value is not None:
            value = value.double().flatten()
            weights = torch.linspace(0.2 + index, -1.0, len(value), dtype=torch.float64)
            total = total + (value.masked_fill(value == -math.inf, 0.0) * weights).sum()
    return total


def compare(
    hidden_TD: Tensor, head_VD: Tensor, ids_TK: Tensor, tolerance: float = 3e-5, **options: Any
) -> tuple[HeadOutputs, list[Tensor]]:
    """Run both; assert equal values and gradients; return what the primitive gave."""
    results: list[tuple[HeadOutputs, list[Tensor]]] = []
    functions: tuple[Callable[..., HeadOutputs], ...] = (head_outputs, dense_outputs)
    for function in functions:
        leaves = [hidden_TD.clone().requires_grad_(), head_VD.clone().requires_grad_()]
        given = dict(options)
        if "bias" in options:
            given["bias"] = options["bias"].clone().requires_grad_()
            leaves.append(given["bias"])
        outputs = function(leaves[0], leaves[1], ids_TK, **given)
        weigh(outputs).backward()
        results.append((outputs, [leaf.grad for leaf in leaves if leaf.grad is not None]))
    for ours, dense in zip(results[0][0], results[1][0], strict=True):
        if ours is None:
            assert dense is None
            continue
        torch.testing.assert_close(ours.double(), dense, rtol=tolerance, atol=tolerance)
    for grad, dense_grad in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(grad, dense_grad, rtol=tolerance, atol=tolerance * float(dense_grad.abs().max()))
    return results[0]
