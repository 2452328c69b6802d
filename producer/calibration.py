"""``threshold:N`` to theta: settled once for a dataset, on some of the block that its plan names.

A row keeps one entry for each p >= theta, the rest's mass divided by theta on average, and the realised token and the
argmax in any case: a decreasing function of theta, which is read off a fine grid.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from logitstore.producer.packing import PackedBatch, Windows, pack
from logitstore.producer.policy import Rows, rows_of
from logitstore.producer.systematic import MIN_THETA
from logitstore.producer.teacher import Teacher
from logitstore.token_parts import TokenBlock

_CALIBRATION_TOKENS = 8192
_CHUNK_ROWS = 256
# Two significant figures are plenty, and keep a theta from depending on the last bits of a forward pass.
_GRID = np.unique([float(f"{theta:.2g}") for theta in np.geomspace(1e-5, 0.9, 400)])
_GRID = _GRID[_GRID >= MIN_THETA]


@torch.inference_mode()
def resolve_theta(
    teacher: Teacher,
    tokens: TokenBlock,
    windows: Windows,
    batch_tokens: int,
    entries: float,
    project: Callable[[Rows], Rows] | None = None,
) -> float:
    """The theta of the grid whose mean number of entries a row is nearest to ``entries``.

    Args:
        teacher: loaded and checked.
        tokens: of the block that thetas are settled on.
        windows: how long documents are cut.
        batch_tokens: tokens of a packed batch.
        entries: of a row, on average.
        project: from rows over tokens to those that entries are chosen from, if they are others.
    """
    grid_G = torch.tensor(_GRID, dtype=torch.float32, device=teacher.device)
    total_G, num_rows = torch.zeros(len(_GRID), dtype=torch.float64, device=teacher.device), 0
    for batch in _sample(pack(tokens, windows, batch_tokens)):
        ids, positions, outputs, realised = (
            torch.from_numpy(array).to(teacher.device)
            for array in (batch.ids, batch.positions, batch.outputs, tokens.ids[batch.rows].astype(np.int64))
        )
        hidden_RD = teacher.hidden(ids, positions)[outputs]
        for chunk_RD, realised_R in zip(hidden_RD.split(_CHUNK_ROWS), realised.split(_CHUNK_ROWS), strict=True):
            rows = rows_of(teacher.head(chunk_RD), realised_R)
            total_G += _expected_entries(rows if project is None else project(rows), grid_G)
        num_rows += len(realised)
    mean_G = (total_G / max(1, num_rows)).clamp(min=1.0).cpu().numpy()
    return float(_GRID[np.argmin(np.abs(np.log(mean_G / entries)))])


def _sample(batches: list[PackedBatch]) -> list[PackedBatch]:
    """Batches with about ``_CALIBRATION_TOKENS``, evenly from all: neighbours hold documents of like length."""
    num_tokens = sum(len(batch.ids) for batch in batches)
    return batches[:: max(1, num_tokens // _CALIBRATION_TOKENS)]


def _expected_entries(rows: Rows, grid_G: Tensor) -> Tensor:
    """float64 [G]: expected number of entries, summed over the rows."""
    probs_RV, argmax_R, realised_R = rows.probs_RV, rows.argmax_R, rows.realised_R
    sorted_RV = probs_RV.sort(-1).values
    # On the CPU, because CUDA's running sums of floats differ from run to run.
    mass_RV = sorted_RV.cpu().cumsum(-1).to(sorted_RV.device)
    below_RG = torch.searchsorted(sorted_RV, grid_G.expand(len(probs_RV), -1).contiguous())
    rest_RG = torch.where(below_RG > 0, mass_RV.gather(-1, (below_RG - 1).clamp(min=0)), 0.0)
    entries_RG = (probs_RV.shape[-1] - below_RG) + rest_RG / grid_G
    entries_RG += _forced(probs_RV, realised_R, grid_G)
    entries_RG += _forced(probs_RV, argmax_R, grid_G).masked_fill((argmax_R == realised_R)[:, None], 0.0)
    return entries_RG.double().sum(0)


def _forced(probs_RV: Tensor, id_R: Tensor, grid_G: Tensor) -> Tensor:
    """float32 [R, G]: what keeping a token for certain adds to its chance of being kept."""
    return (1 - probs_RV.gather(-1, id_R[:, None]) / grid_G).clamp(min=0)
