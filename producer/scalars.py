"""A few numbers about each row's whole distribution, from logits that are at hand.

Shapes: R rows of a chunk, V vocabulary, S columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from logitstore.signals import STARTS_FLOOR_NATS


def scalars_of(
    logits_RV: Tensor,
    probs_RV: Tensor,
    log_z_R: Tensor,
    argmax_R: Tensor,
    realised_R: Tensor,
    starts_VC: Tensor,
    temperatures: tuple[float, ...],
    *,
    log_z: bool,
) -> Tensor:
    """float32 [R, S], columns as ``signals.scalar_columns`` names them."""
    columns = [
        _logprob(logits_RV, log_z_R, realised_R),
        _rank(logits_RV, realised_R).float(),
        argmax_R.float(),
        _logprob(logits_RV, log_z_R, argmax_R),
        log_z_R - (probs_RV * logits_RV).sum(-1),
        # Sums over the class itself: below the floor, float32 probabilities underflow.
        *(probs_RV @ starts_VC).log().clamp(min=STARTS_FLOOR_NATS).unbind(-1),
    ]
    columns += [
        scaled_logprobs(logits_RV, log_z_R, temperature).logsumexp(-1)
        for temperature in temperatures
        if temperature != 1.0
    ]
    return torch.stack([*columns, log_z_R] if log_z else columns, dim=-1)


def scaled_logprobs(logits_RV: Tensor, log_z_R: Tensor, temperature: float) -> Tensor:
    """float32 [R, V]: log p / T."""
    return (logits_RV.float() - log_z_R[:, None]) / temperature


def _logprob(logits_RV: Tensor, log_z_R: Tensor, id_R: Tensor) -> Tensor:
    return logits_RV.gather(-1, id_R[:, None])[:, 0].float() - log_z_R


def _rank(logits_RV: Tensor, realised_R: Tensor) -> Tensor:
    """int32 [R]: how many tokens come before the realised one, by (logit descending, id ascending)."""
    logit_R1 = logits_RV.gather(-1, realised_R[:, None])
    rank_R = (logits_RV > logit_R1).sum(-1, dtype=torch.int32)
    tied_RV = logits_RV == logit_R1
    tied_R = tied_RV.sum(-1, dtype=torch.int32) > 1
    if tied_R.any():
        earlier_V = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
        rank_R[tied_R] += (tied_RV[tied_R] & (earlier_V < realised_R[tied_R, None])).sum(-1, dtype=torch.int32)
    return rank_R
