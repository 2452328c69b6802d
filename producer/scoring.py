"""One block through a teacher: packed forwards, then hidden states to signals in chunks of rows.

Shapes: N tokens of a batch, R rows of a chunk, V vocabulary, S scalars or temperatures, E entries, C classes of starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from logitstore.counter_random import uniform_words
from logitstore.errors import ModelError
from logitstore.producer.given import GivenRows
from logitstore.producer.packing import Windows, pack
from logitstore.producer.policy import Entries, Policy, Rows
from logitstore.producer.scalars import scalars_of, scaled_logprobs
from logitstore.producer.teacher import Teacher
from logitstore.signals import START_CLASSES, SparseSignal, scalar_columns
from logitstore.sparse import DEFAULT_STEP_NATS, MAX_QUANTA, NOT_STORED, SparseRows, coarse_quanta, offsets_of
from logitstore.token_parts import TokenBlock

_CHUNK_LOGITS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Logits that are worked on at once: what a CPU's caches hold; on a GPU, enough to hide the launching of kernels."""

_TINY_MASS = 1e-35
"""Below this, sums of float32 probabilities lose what underflows."""

# An entry as one integer that sorts into the stored order: row, whether it is not the realised token, quanta, id; last,
# its draws. Rows and ids take at most 28 bits together, since a chunk has at most 2^26 logits or a single row.
_ID_SHIFT = 16


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What is written down about each row.

    Attributes:
        policy: which entries to keep; None for scalars only.
        temperatures: for which log Z and the mass outside the row are kept; 1.0 first.
        step_nats: of the entries' log-probs.
        tail_step_nats: of those of unlikely tokens, see ``coarse_quanta``; the same if None.
        sampled_logprobs: whether those of sampled entries are kept.
        log_z: whether the raw log Z is a scalar.
        starts: float32 [V, C] as ``scalars.start_masks`` makes it; None if nothing is known of the tokens.
    """

    policy: Policy | None
    temperatures: tuple[float, ...] = (1.0,)
    step_nats: float = DEFAULT_STEP_NATS
    tail_step_nats: float | None = None
    sampled_logprobs: bool = False
    log_z: bool = False
    starts: np.ndarray | None = field(default=None, repr=False)

    @property
    def columns(self) -> list[str]:
        return scalar_columns(self.temperatures, log_z=self.log_z)


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


@torch.inference_mode()
def score_block(
    teacher: Teacher,
    tokens: TokenBlock,
    document_words: np.ndarray,
    windows: Windows,
    batch_tokens: int,
    measures: Measures,
    progress: Callable[[int], None] = lambda num_tokens: None,
    given: GivenRows | None = None,
) -> ScoredBlock:
    """Run the teacher over a block.

    Args:
        teacher: loaded and checked.
        tokens: of the block.
        document_words: uint64 [D], 64 bits of each document's digest, which key its random numbers.
        windows: how long documents are cut.
        batch_tokens: tokens of a packed batch.
        measures: what is kept.
        progress: called with the number of tokens after each batch.
        given: ids for the block's rows, if the policy selects by such.

    Raises:
        ModelError: the teacher's logits are not finite.
    """
    policy, device = measures.policy, teacher.device
    words = uniform_words(
        0 if policy is None else policy.seed, np.repeat(document_words, tokens.ends - tokens.begins), tokens.positions()
    ).view(np.int64)
    scalars = np.full((tokens.num_tokens, len(measures.columns)), np.nan, np.float32)
    rest = np.full((tokens.num_tokens, len(measures.temperatures)), np.nan, np.float32)
    scored = np.zeros(tokens.num_tokens, bool)
    found: list[tuple[np.ndarray, SparseRows]] = []
    starts = measures.starts
    if starts is None:
        starts = np.zeros((teacher.vocabulary_size, len(START_CLASSES)), np.float32)
    starts_VC = torch.from_numpy(starts).to(device)
    chunk = max(1, _CHUNK_LOGITS.get(device.type, 1 << 22) // teacher.vocabulary_size)
    for batch in pack(tokens, windows, batch_tokens):
        hidden_ND = teacher.hidden(torch.from_numpy(batch.ids).to(device), torch.from_numpy(batch.positions).to(device))
        hidden_TD = hidden_ND[torch.from_numpy(batch.outputs).to(device)]
        for begin in range(0, len(batch.rows), chunk):
            rows = batch.rows[begin : begin + chunk]
            realised_R = torch.from_numpy(tokens.ids[rows].astype(np.int64)).to(device)
            words_R = torch.from_numpy(words[rows]).to(device)
            given_RK = None if given is None else torch.from_numpy(given.table(rows)).to(device)
            logits_RV = teacher.head(hidden_TD[begin : begin + chunk])
            scalars[rows], chosen = _score_rows(
                teacher.where, logits_RV, realised_R, words_R, given_RK, starts_VC, measures
            )
            if chosen is not None:
                entries, rest[rows] = chosen
                found.append((rows, entries))
        scored[batch.rows] = True
        progress(len(batch.ids))
    if policy is None:
        return ScoredBlock(scalars, scored, None)
    entries = _assemble(tokens, found, measures.step_nats)
    sparse = SparseSignal(entries, rest, measures.temperatures, policy.draw_weight, measures.tail_step_nats)
    return ScoredBlock(scalars, scored, sparse)


def _score_rows(
    where: str,
    logits_RV: Tensor,
    realised_R: Tensor,
    words_R: Tensor,
    given_RK: Tensor | None,
    starts_VC: Tensor,
    measures: Measures,
) -> tuple[np.ndarray, tuple[SparseRows, np.ndarray] | None]:
    """Of one chunk: scalars [R, S]; with a policy, entries and log mass outside the row [R, S]."""
    probs_RV = torch.softmax(logits_RV, dim=-1, dtype=torch.float32)
    max_R, argmax_R = logits_RV.max(-1)  # torch promises the first of equal maxima
    # The likeliest token has p >= 1 / V, so this is log Z to the last digits without another pass.
    log_z_R = max_R.float() - probs_RV.gather(-1, argmax_R[:, None])[:, 0].log()
    temperatures = measures.temperatures
    columns_RS = scalars_of(
        logits_RV, probs_RV, log_z_R, argmax_R, realised_R, starts_VC, temperatures, log_z=measures.log_z
    )
    scalars = columns_RS.cpu().numpy()
    if not np.isfinite(scalars).all():
        raise ModelError(
            f"{where}: its logits are not finite (NaN or infinity); try --dtype fp32, or check the weights"
        )
    if measures.policy is None:
        return scalars, None
    chosen = measures.policy.select(Rows(logits_RV, probs_RV, argmax_R, realised_R, words_R, given_RK))
    logprob_E = logits_RV[chosen.row_E, chosen.id_E].float() - log_z_R[chosen.row_E]
    quanta_E = (logprob_E * (-1 / measures.step_nats)).round().clamp(0, MAX_QUANTA).to(torch.int64)
    if measures.tail_step_nats is not None:
        coarse = coarse_quanta(measures.step_nats, measures.tail_step_nats).astype(np.int64)
        quanta_E = torch.from_numpy(coarse).to(quanta_E.device)[quanta_E]
    if not measures.sampled_logprobs:
        quanta_E.masked_fill_(chosen.draws_E > 0, NOT_STORED)
    entries = _in_stored_order(chosen, quanta_E, realised_R, logits_RV.shape[-1])
    rest_RS = _log_rests(logits_RV, probs_RV, log_z_R, chosen, temperatures)
    return scalars, (entries, rest_RS.cpu().numpy())


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


def _assemble(tokens: TokenBlock, found: list[tuple[np.ndarray, SparseRows]], step_nats: float) -> SparseRows:
    """Chunks of rows, each with the numbers of its rows in the block, put in the block's order."""
    counts = np.zeros(tokens.num_tokens, np.int64)
    for rows, entries in found:
        counts[rows] = entries.counts
    offsets = offsets_of(counts)
    ids, quanta, draws = (np.empty(offsets[-1], kind) for kind in (np.int32, np.uint16, np.uint16))
    for rows, entries in found:
        places = np.repeat(offsets[rows] - entries.offsets[:-1], entries.counts) + np.arange(entries.num_entries)
        ids[places], quanta[places], draws[places] = entries.ids, entries.quanta, entries.draws
    return SparseRows(offsets, ids, quanta, draws, step_nats)
