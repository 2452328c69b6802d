"""One block through a teacher: packed forwards, then hidden states to signals in chunks of rows.

Shapes: N tokens of a batch, R rows of a chunk, V vocabulary, S scalars or temperatures, E entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from logitstore.counter_random import uniform_words
from logitstore.errors import ModelError
from logitstore.producer.packing import Windows, pack
from logitstore.producer.selection import Policy, first_argmax
from logitstore.producer.teacher import Teacher
from logitstore.signals import SparseSignal, scalar_columns
from logitstore.sparse import SparseRows, offsets_of, quantise
from logitstore.token_parts import TokenBlock

_CHUNK_LOGITS = 1 << 22
"""Logits that are in float32 at once: rows are processed ``_CHUNK_LOGITS / V`` at a time."""


@dataclass(frozen=True)
class ScoredBlock:
    """What a teacher said about a block of T tokens.

    Attributes:
        scalars: float32 [T, S], columns as ``scalar_columns`` names them.
        scored: bool [T].
        sparse: None unless a selection was given.
    """

    scalars: np.ndarray
    scored: np.ndarray
    sparse: SparseSignal | None


@dataclass(frozen=True)
class _Entries:
    """Unordered entries of some rows: row, id, log-prob, sampled; each [E]."""

    rows: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray
    sampled: np.ndarray


def score_block(
    teacher: Teacher,
    tokens: TokenBlock,
    document_words: np.ndarray,
    windows: Windows,
    batch_tokens: int,
    policy: Policy | None,
    temperatures: tuple[float, ...],
    progress: Callable[[int], None] = lambda num_tokens: None,
) -> ScoredBlock:
    """Run the teacher over a block.

    Args:
        teacher: loaded and checked.
        tokens: of the block.
        document_words: uint64 [D], 64 bits of each document's digest, which key its random numbers.
        windows: how long documents are cut.
        batch_tokens: tokens of a packed batch.
        policy: which entries to keep; None for scalars only.
        temperatures: for which log Z and the mass outside the row are kept; 1.0 first.
        progress: called with the number of tokens after each batch.

    Raises:
        ModelError: the teacher's logits are not finite.
    """
    words = uniform_words(
        policy_seed(policy), np.repeat(document_words, tokens.ends - tokens.begins), tokens.positions()
    ).view(np.int64)
    scalars = np.full((tokens.num_tokens, len(scalar_columns(temperatures))), np.nan, np.float32)
    rest = np.full((tokens.num_tokens, len(temperatures)), np.nan, np.float32)
    scored = np.zeros(tokens.num_tokens, bool)
    entries: list[_Entries] = []
    for batch in pack(tokens, windows, batch_tokens):
        device = teacher.device
        hidden_ND = teacher.hidden(torch.from_numpy(batch.ids).to(device), torch.from_numpy(batch.positions).to(device))
        chunk = max(1, _CHUNK_LOGITS // teacher.vocabulary_size)
        for begin in range(0, len(batch.rows), chunk):
            rows = batch.rows[begin : begin + chunk]
            logits_RV = _logits(teacher, hidden_ND[torch.from_numpy(batch.outputs[begin : begin + chunk]).to(device)])
            realised_R = torch.from_numpy(tokens.ids[rows].astype(np.int64)).to(device)
            scalars[rows], found, rest[rows] = _score_rows(
                logits_RV, realised_R, torch.from_numpy(words[rows]).to(device), rows, policy, temperatures
            )
            entries.extend(found)
        scored[batch.rows] = True
        progress(len(batch.ids))
    sparse = None
    if policy is not None:
        sparse = SparseSignal(_assemble(tokens, entries), rest, temperatures, policy.theta)
    return ScoredBlock(scalars, scored, sparse)


def policy_seed(policy: Policy | None) -> int:
    return int(policy.to_json().get("seed", "0")) if policy is not None else 0


@torch.inference_mode()
def _logits(teacher: Teacher, hidden_RD: Tensor) -> Tensor:
    logits_RV = teacher.head(hidden_RD)
    if not torch.isfinite(logits_RV).all():
        raise ModelError(
            f"{teacher.where}: its logits are not finite (NaN or infinity); try --dtype fp32, or check the weights"
        )
    return logits_RV


@torch.inference_mode()
def _score_rows(
    logits_RV: Tensor,
    realised_R: Tensor,
    words_R: Tensor,
    rows: np.ndarray,
    policy: Policy | None,
    temperatures: tuple[float, ...],
) -> tuple[np.ndarray, list[_Entries], np.ndarray]:
    """Scalars [R, S], entries and log mass outside the row [R, S] of one chunk."""
    logprobs_RV = logits_RV.float().log_softmax(-1)
    scalars = _scalars(logits_RV, logprobs_RV, realised_R, temperatures)
    if policy is None:
        return scalars, [], np.full((len(rows), len(temperatures)), -np.inf, np.float32)
    kept_RV, sampled_RV = policy.select(logits_RV, logprobs_RV, realised_R, words_R)
    row_E, id_E = kept_RV.nonzero(as_tuple=True)
    entries = _Entries(
        rows[row_E.cpu().numpy()],
        id_E.cpu().numpy(),
        logprobs_RV[row_E, id_E].cpu().numpy(),
        sampled_RV[row_E, id_E].cpu().numpy(),
    )
    # The mass outside is summed over what is outside: 1 - sum would be noise.
    outside_RV = logprobs_RV.masked_fill(kept_RV, -torch.inf)
    rest_RS = torch.stack([(outside_RV / temperature).logsumexp(-1) for temperature in temperatures], dim=-1)
    return scalars, [entries], rest_RS.cpu().numpy()


def _scalars(logits_RV: Tensor, logprobs_RV: Tensor, realised_R: Tensor, temperatures: tuple[float, ...]) -> np.ndarray:
    """float32 [R, S], columns as ``scalar_columns`` names them."""
    realised_R1 = realised_R[:, None]
    logit_R1 = logits_RV.gather(-1, realised_R1)
    ids_V = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
    rank_R = (logits_RV > logit_R1).sum(-1) + ((logits_RV == logit_R1) & (ids_V < realised_R1)).sum(-1)
    columns = [
        logprobs_RV.gather(-1, realised_R1)[:, 0],
        rank_R.float(),
        first_argmax(logits_RV).float(),
        logprobs_RV.amax(-1),
        -(logprobs_RV.exp() * logprobs_RV).sum(-1),
    ]
    columns += [(logprobs_RV / temperature).logsumexp(-1) for temperature in temperatures if temperature != 1.0]
    return torch.stack(columns, dim=-1).cpu().numpy()


def _assemble(tokens: TokenBlock, found: list[_Entries]) -> SparseRows:
    """Entries in the stored order: by row, the realised token first, then by (quanta, id)."""
    rows = np.concatenate([entries.rows for entries in found]) if found else np.empty(0, np.int64)
    ids = np.concatenate([entries.ids for entries in found]) if found else np.empty(0, np.int64)
    quanta = quantise(np.concatenate([entries.logprobs for entries in found])) if found else np.empty(0, np.uint16)
    sampled = np.concatenate([entries.sampled for entries in found]) if found else np.empty(0, bool)
    order = np.lexsort((ids, quanta, ids != tokens.ids[rows], rows))
    counts = np.bincount(rows, minlength=tokens.num_tokens)
    return SparseRows(offsets_of(counts), ids[order].astype(np.int32), quanta[order], sampled[order])
