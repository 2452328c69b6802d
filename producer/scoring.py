"""One block through a teacher: packed forwards, then hidden states to signals in chunks of rows.

Shapes: N tokens of a batch, R rows of a chunk, V vocabulary, S scalars, C classes of starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from logitstore.errors import ModelError
from logitstore.producer.given import GivenRows
from logitstore.producer.packing import Windows, pack
from logitstore.producer.policy import Policy, Rows, rows_of
from logitstore.producer.projecting import Projected
from logitstore.producer.row_writer import RowWriter
from logitstore.producer.scalars import scalars_of
from logitstore.producer.teacher import Teacher
from logitstore.signals import PROJECTED_TEMPERATURES, START_CLASSES, SparseSignal, scalar_columns
from logitstore.sparse import DEFAULT_STEP_NATS
from logitstore.token_parts import TokenBlock

_CHUNK_LOGITS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Logits that are worked on at once: what a CPU's caches hold; on a GPU, enough to hide the launching of kernels."""

_TOKENS = ""
"""Name, among the signals of a block, of the rows over tokens."""


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What is written down about each row.

    Attributes:
        policy: which entries to keep of rows over tokens; None for none.
        projected: by name, what else to keep: rows over the classes that another vocabulary shares, at temperature 1.
        temperatures: for which log Z and the mass outside the row are kept; 1.0 first.
        step_nats: of the entries' log-probs.
        tail_step_nats: of those of unlikely tokens, see ``coarse_quanta``; the same if None.
        sampled_logprobs: whether those of sampled entries are kept.
        log_z: whether the raw log Z is a scalar.
        starts: float32 [V, C] as ``start_masks`` makes it; None if nothing is known of the tokens.
    """

    policy: Policy | None
    temperatures: tuple[float, ...] = (1.0,)
    step_nats: float = DEFAULT_STEP_NATS
    tail_step_nats: float | None = None
    sampled_logprobs: bool = False
    log_z: bool = False
    starts: np.ndarray | None = field(default=None, repr=False)
    projected: Mapping[str, Projected] = field(default_factory=dict, repr=False)

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
        projected: by the names that ``Measures.projected`` has.
    """

    scalars: np.ndarray
    scored: np.ndarray
    sparse: SparseSignal | None
    projected: dict[str, SparseSignal] = field(default_factory=dict)


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
        given: ids for the block's rows, if a policy selects by such.

    Raises:
        ModelError: the teacher's logits are not finite.
    """
    device = teacher.device
    scalars = np.full((tokens.num_tokens, len(measures.columns)), np.nan, np.float32)
    scored = np.zeros(tokens.num_tokens, bool)
    writers = _writers(tokens, document_words, measures)
    projections = {name: each.projection.to(device) for name, each in measures.projected.items()}
    starts = measures.starts
    if starts is None:
        starts = np.zeros((teacher.vocabulary_size, len(START_CLASSES)), np.float32)
    starts_VC = torch.from_numpy(starts).to(device)
    chunk = max(1, _CHUNK_LOGITS.get(device.type, 1 << 22) // teacher.vocabulary_size)
    for batch in pack(tokens, windows, batch_tokens):
        hidden_ND = teacher.hidden(torch.from_numpy(batch.ids).to(device), torch.from_numpy(batch.positions).to(device))
        hidden_TD = hidden_ND[torch.from_numpy(batch.outputs).to(device)]
        for begin in range(0, len(batch.rows), chunk):
            numbers = batch.rows[begin : begin + chunk]
            realised_R = torch.from_numpy(tokens.ids[numbers].astype(np.int64)).to(device)
            given_RK = None if given is None else torch.from_numpy(given.table(numbers)).to(device)
            rows = rows_of(teacher.head(hidden_TD[begin : begin + chunk]), realised_R, given_RK)
            scalars[numbers], log_z_R = _score_rows(teacher.where, rows, starts_VC, measures)
            for name, projection in projections.items():
                writers[name].add(numbers, projection.push_forward(rows), torch.zeros_like(log_z_R))
            if _TOKENS in writers:  # the last, for it overwrites the probabilities
                writers[_TOKENS].add(numbers, rows, log_z_R)
        scored[batch.rows] = True
        progress(len(batch.ids))
    signals = {name: writer.finish() for name, writer in writers.items()}
    sparse = signals.pop(_TOKENS, None)
    return ScoredBlock(scalars, scored, sparse, signals)


def _writers(tokens: TokenBlock, document_words: np.ndarray, measures: Measures) -> dict[str, RowWriter]:
    """By name of the signal."""
    writer = partial(
        RowWriter,
        tokens,
        document_words,
        step_nats=measures.step_nats,
        tail_step_nats=measures.tail_step_nats,
        sampled_logprobs=measures.sampled_logprobs,
    )
    writers = {
        name: writer(each.policy, temperatures=PROJECTED_TEMPERATURES, projection=each.projection.maps)
        for name, each in measures.projected.items()
    }
    if measures.policy is not None:
        writers[_TOKENS] = writer(measures.policy, temperatures=measures.temperatures)
    return writers


def _score_rows(where: str, rows: Rows, starts_VC: Tensor, measures: Measures) -> tuple[np.ndarray, Tensor]:
    """Scalars [R, S] of one chunk, and its log Z, float32 [R]."""
    logits_RV, probs_RV, argmax_R = rows.logits_RV, rows.probs_RV, rows.argmax_R[:, None]
    # The likeliest token has p >= 1 / V, so this is log Z to the last digits without another pass.
    log_z_R = logits_RV.gather(-1, argmax_R)[:, 0].float() - probs_RV.gather(-1, argmax_R)[:, 0].log()
    columns_RS = scalars_of(
        logits_RV,
        probs_RV,
        log_z_R,
        rows.argmax_R,
        rows.realised_R,
        starts_VC,
        measures.temperatures,
        log_z=measures.log_z,
    )
    scalars = columns_RS.cpu().numpy()
    if not np.isfinite(scalars).all():
        raise ModelError(
            f"{where}: its logits are not finite (NaN or infinity); try --dtype fp32, or check the weights"
        )
    return scalars, log_z_R
