"""A few numbers about each row's whole distribution, from logits that are at hand.

Shapes: R rows of a chunk, V vocabulary, S columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from logitstore.signals import START_CLASSES, STARTS_FLOOR_NATS

_LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_WORD_BYTES = frozenset(_LETTERS + b"0123456789_")
_SPACE_BYTES = frozenset(b" \t\n\r\v\f")


def start_masks(token_bytes: Sequence[bytes | None], special_ids: frozenset[int], vocabulary_size: int) -> np.ndarray:
    """float32 [V, C]: 1 where a token starts at a boundary of the class, in the order of ``START_CLASSES``.

    Args:
        token_bytes: of the teacher's tokenizer, None for tokens without bytes.
        special_ids: of its special tokens, which end a text or a turn.
        vocabulary_size: V, of the teacher's head, which may be wider.
    """
    masks = np.zeros((vocabulary_size, len(START_CLASSES)), np.float32)
    for token, data in enumerate(token_bytes):
        name = _start_class(data, token in special_ids)
        if name is not None:
            masks[token, START_CLASSES.index(name)] = 1.0
    return masks


def _start_class(data: bytes | None, is_special: bool) -> str | None:
    if not data:
        return "end" if is_special else None
    if data[0] in _SPACE_BYTES:
        return "space"
    return "punctuation" if data[0] < 128 and data[0] not in _WORD_BYTES else None


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
