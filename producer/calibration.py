"""``threshold:N`` to theta: settled once for a dataset, on the first tokens of the block that its plan names.

A row keeps one entry for each p >= theta, and the rest's mass divided by theta on average: a decreasing function of
theta, which is read off a fine grid.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from logitstore.producer.packing import Windows, pack
from logitstore.producer.teacher import Teacher
from logitstore.token_parts import TokenBlock

_CALIBRATION_TOKENS = 8192
_CHUNK_ROWS = 256
# Two significant figures are plenty, and keep a theta from depending on the last bits of a forward pass.
_GRID = np.unique([float(f"{theta:.2g}") for theta in np.geomspace(1e-5, 0.9, 400)])


def resolve_theta(teacher: Teacher, tokens: TokenBlock, windows: Windows, batch_tokens: int, entries: float) -> float:
    """The theta of the grid whose mean number of entries a row is nearest to ``entries``."""
    grid_G = torch.tensor(_GRID, dtype=torch.float32, device=teacher.device)
    total_G, num_rows = torch.zeros(len(_GRID), dtype=torch.float64, device=teacher.device), 0
    for batch in pack(tokens, windows, batch_tokens):
        ids, positions = torch.from_numpy(batch.ids), torch.from_numpy(batch.positions)
        hidden_ND = teacher.hidden(ids.to(teacher.device), positions.to(teacher.device))
        for hidden_RD in hidden_ND[torch.from_numpy(batch.outputs).to(teacher.device)].split(_CHUNK_ROWS):
            total_G += _expected_entries(teacher, hidden_RD, grid_G)
            num_rows += len(hidden_RD)
        if num_rows >= _CALIBRATION_TOKENS:
            break
    mean_G = (total_G / max(1, num_rows)).cpu().numpy()
    return float(_GRID[np.argmin(np.abs(np.log(mean_G / entries)))])


@torch.inference_mode()
def _expected_entries(teacher: Teacher, hidden_RD: Tensor, grid_G: Tensor) -> Tensor:
    """float64 [G]: expected number of entries, summed over the rows."""
    probs_RV = teacher.head(hidden_RD).float().softmax(-1).sort(-1).values
    mass_RV = probs_RV.cumsum(-1)
    below_RG = torch.searchsorted(probs_RV, grid_G.expand(len(probs_RV), -1).contiguous())
    rest_RG = torch.where(below_RG > 0, mass_RV.gather(-1, (below_RG - 1).clamp(min=0)), 0.0)
    return ((probs_RV.shape[-1] - below_RG) + rest_RG / grid_G).double().sum(0)
