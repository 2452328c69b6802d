"""What is kept of rows: entries chosen, rounded and put in the stored order, and the mass outside them.

Shapes: R rows of a chunk, V vocabulary (or classes), S temperatures, E entries.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from logitstore.counter_random import uniform_words
from logitstore.producer.policy import Entries, Policy, Rows
from logitstore.producer.scalars import scaled_logprobs
from logitstore.signals import SparseSignal
from logitstore.sparse import MAX_QUANTA, NOT_STORED, SparseRows, coarse_quanta, offsets_of
from logitstore.token_parts import TokenBlock

_TINY_MASS = 1e-35
"""Below this, sums of float32 probabilities lose what underflows."""

# An entry as one integer that sorts into the stored order: row, whether it is not the realised token, quanta, id; last,
# its draws. Rows and ids take at most 28 bits together, since a chunk has at most 2^26 logits or a single row.
_ID_SHIFT = 16


class RowWriter:
    """Collects a block's rows, chunk by chunk."""

    def __init__(
        self,
        tokens: TokenBlock,
        document_words: np.ndarray,
        policy: Policy,
        *,
        temperatures: tuple[float, ...],
        step_nats: float,
        tail_step_nats: float | None,
        sampled_logprobs: bool,
        projection: str | None = None,
    ) -> None:
        """
        Args:
            tokens: of the block, T in all.
            document_words: uint64 [D], 64 bits of each document's digest, which key its random numbers.
            policy: which entries to keep.
            temperatures: of the mass outside the row; 1.0 first.
            step_nats: of the entries' log-probs.
            tail_step_nats: of those of unlikely tokens, see ``coarse_quanta``; the same if None.
            sampled_logprobs: whether those of sampled entries are kept.
            projection: digest of the vocabulary maps whose classes the rows are over; None for tokens.
        """
        self._policy, self._temperatures, self._step_nats = policy, temperatures, step_nats
        self._tail_step_nats, self._sampled_logprobs, self._projection = tail_step_nats, sampled_logprobs, projection
        documents = np.repeat(document_words, tokens.ends - tokens.begins)
        self._words = uniform_words(policy.seed, documents, tokens.positions()).view(np.int64)
        self._rest = np.full((tokens.num_tokens, len(temperatures)), np.nan, np.float32)
        self._found: list[tuple[np.ndarray, SparseRows]] = []

    def add(self, numbers: np.ndarray, rows: Rows, log_z_R: Tensor) -> None:
        """Keep what the policy chooses of some rows. Overwrites their probabilities.

        Args:
            numbers: int64 [R], where they are in the block.
            rows: their distributions; the random words are put in here.
            log_z_R: float32, log of the sum of exp(logit).
        """
        rows = rows._replace(words_R=torch.from_numpy(self._words[numbers]).to(log_z_R.device))
        chosen = self._policy.select(rows)
        logprob_E = rows.logits_RV[chosen.row_E, chosen.id_E].float() - log_z_R[chosen.row_E]
        quanta_E = self._quanta(logprob_E)
        if not self._sampled_logprobs:
            quanta_E.masked_fill_(chosen.draws_E > 0, NOT_STORED)
        entries = _in_stored_order(chosen, quanta_E, rows.realised_R, rows.logits_RV.shape[-1])
        rest_RS = _log_rests(rows.logits_RV, rows.probs_RV, log_z_R, chosen, self._temperatures)
        self._rest[numbers] = rest_RS.cpu().numpy()
        self._found.append((numbers, entries))

    def _quanta(self, logprob_E: Tensor) -> Tensor:
        quanta_E = (logprob_E * (-1 / self._step_nats)).round().clamp(0, MAX_QUANTA).to(torch.int64)
        if self._tail_step_nats is None:
            return quanta_E
        coarse = coarse_quanta(self._step_nats, self._tail_step_nats).astype(np.int64)
        return torch.from_numpy(coarse).to(quanta_E.device)[quanta_E]

    def finish(self) -> SparseSignal:
        """All rows, in the block's order; those that were not added have no entries."""
        rows = _assemble(len(self._rest), self._found, self._step_nats)
        return SparseSignal(
            rows, self._rest, self._temperatures, self._policy.draw_weight, self._tail_step_nats, self._projection
        )


def _log_rests(
    logits_RV: Tensor, probs_RV: Tensor, log_z_R: Tensor, chosen: Entries, temperatures: tuple[float, ...]
) -> Tensor:
    """float32 [R, S]: per temperature, log of the sum of p^(1/T) outside the row. Overwrites ``probs_RV``."""
    # The mass outside is summed over what is outside: 1 - sum would be noise.
    probs_RV[chosen.row_E, chosen.id_E] = 0.0
    mass_R = probs_RV.sum(-1)
    underflows = bool((mass_R < _TINY_MASS).any())
    columns = []
    for temperature in temperatures:
        if temperature == 1.0 and not underflows:
            columns.append(mass_R.log())
        else:
            scaled_RV = scaled_logprobs(logits_RV, log_z_R, temperature)
            scaled_RV[chosen.row_E, chosen.id_E] = -torch.inf
            columns.append(scaled_RV.logsumexp(-1))
    return torch.stack(columns, dim=-1)


def _in_stored_order(chosen: Entries, quanta_E: Tensor, realised_R: Tensor, vocabulary_size: int) -> SparseRows:
    """The entries of a chunk by row, the realised token first, then by (quanta, id)."""
    id_bits = vocabulary_size.bit_length()
    quanta_shift = _ID_SHIFT + id_bits
    other_shift = quanta_shift + 16
    row_shift = other_shift + 1
    other_E = (chosen.id_E != realised_R[chosen.row_E]).to(torch.int64)
    key_E = (
        (chosen.row_E << row_shift)
        | (other_E << other_shift)
        | (quanta_E << quanta_shift)
        | (chosen.id_E << _ID_SHIFT)
        | chosen.draws_E
    )
    # NumPy sorts several times faster than torch does on a CPU.
    keys = np.sort(key_E.numpy()) if key_E.device.type == "cpu" else key_E.sort().values.cpu().numpy()
    return SparseRows(
        offsets_of(np.bincount(keys >> row_shift, minlength=len(realised_R))),
        ((keys >> _ID_SHIFT) & ((1 << id_bits) - 1)).astype(np.int32),
        ((keys >> quanta_shift) & 0xFFFF).astype(np.uint16),
        (keys & 0xFFFF).astype(np.uint16),
    )


def _assemble(num_rows: int, found: list[tuple[np.ndarray, SparseRows]], step_nats: float) -> SparseRows:
    """Chunks of rows, each with the numbers of its rows in the block, put in the block's order."""
    counts = np.zeros(num_rows, np.int64)
    for rows, entries in found:
        counts[rows] = entries.counts
    offsets = offsets_of(counts)
    ids, quanta, draws = (np.empty(offsets[-1], kind) for kind in (np.int32, np.uint16, np.uint16))
    for rows, entries in found:
        places = np.repeat(offsets[rows] - entries.offsets[:-1], entries.counts) + np.arange(entries.num_entries)
        ids[places], quanta[places], draws[places] = entries.ids, entries.quanta, entries.draws
    return SparseRows(offsets, ids, quanta, draws, step_nats)
