"""Rows of a teacher as logitstore stores them, next to what is true of the same entries.

Shapes: T rows, K candidates, E entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from store_corpus import load_corpus, token_bytes
from store_rows import TeacherRows

from logitstore.byte_ends import Proof
from logitstore.documents import Document, Segment
from logitstore.parts import Part
from logitstore.signals import SparseSignal, scalar_columns, stage_scalars, stage_sparse
from logitstore.sparse import NOT_STORED, SparseRows, coarse_quanta, offsets_of, quantise
from logitstore.staging import StagedPart, upload
from logitstore.storage import open_storage
from logitstore.text_parts import stage_text
from logitstore.token_parts import stage_tokens
from logitstore.tokenized_document import TokenizedDocument


@dataclass(frozen=True)
class OurRows:
    """Rows of one selection at one step.

    Attributes:
        name: of the selection.
        rows: as they are stored.
        truth: float32 [E], exact log-probs of the entries, nats.
        log_rest: float32 [T], log of the mass outside the row.
        draw_weight: theta of a threshold, else None.
    """

    name: str
    rows: SparseRows
    truth: np.ndarray
    log_rest: np.ndarray
    draw_weight: float | None
    tail_step_nats: float | None = None

    def stage(self) -> StagedPart:
        signal = SparseSignal(self.rows, self.log_rest[:, None], (1.0,), self.draw_weight, self.tail_step_nats)
        return stage_sparse(signal)


def top_k(teacher: TeacherRows, k: int, step_nats: float, tail_step_nats: float | None = None) -> OurRows:
    """``topk:K``: the realised token, then the K likeliest without it."""
    ids_TK, logp_TK = teacher.topk_ids[:, :k], teacher.topk_logp[:, :k]
    others_TK = ids_TK != teacher.tokens[:, None]
    row_E = np.concatenate([np.arange(teacher.num_rows), others_TK.nonzero()[0]])
    ids_E = np.concatenate([teacher.tokens, ids_TK[others_TK]])
    truth_E = np.concatenate([teacher.realised_logp, logp_TK[others_TK]])
    outside_T = others_TK.all(axis=1)
    mass_T = np.exp(teacher.topk_log_rest[:, k - 1], dtype=np.float64)
    # Its noise is that of a float32, and changes no size.
    mass_T -= np.where(outside_T, np.exp(teacher.realised_logp, dtype=np.float64), 0)
    return _in_order(
        f"topk:{k}, step {step_nats:g}" + (f", tail {tail_step_nats:g}" if tail_step_nats else ""),
        row_E, ids_E, truth_E, np.zeros(len(row_E), np.uint16), step_nats,
        np.log(np.maximum(mass_T, 1e-12)).astype(np.float32), None, tail_step_nats,
    )  # fmt: skip


def threshold(teacher: TeacherRows, step_nats: float, *, sampled_logprobs: bool) -> OurRows:
    """``threshold:12``, with or without the log-probs of sampled entries."""
    counts = np.diff(teacher.thr_offsets)
    return _in_order(
        f"threshold:12, step {step_nats:g}" + (", all log-probs" if sampled_logprobs else ""),
        np.repeat(np.arange(teacher.num_rows), counts), teacher.thr_ids, teacher.thr_logp,
        teacher.thr_sampled.astype(np.uint16), step_nats, teacher.thr_log_rest, float(teacher.theta),
        sampled_logprobs=sampled_logprobs,
    )  # fmt: skip


def stage_all_scalars(teacher: TeacherRows) -> StagedPart:
    columns = {
        "logprob": teacher.realised_logp,
        "rank": teacher.rank,
        "argmax_id": teacher.argmax_id,
        "argmax_logprob": teacher.argmax_logp,
        "entropy": teacher.entropy,
        **dict(zip(("starts@space", "starts@punctuation", "starts@end"), teacher.starts.T, strict=True)),
    }
    values = np.stack([columns[name] for name in scalar_columns((1.0,))], axis=1).astype(np.float32)
    return stage_scalars(values, np.ones(teacher.num_rows, bool), (1.0,))


def stage_inputs(vocabulary: str) -> tuple[StagedPart, StagedPart, int]:
    """What a store keeps beside all signals: parts of the corpus's text and of its tokens, and how many tokens."""
    corpus, (spelled, _) = load_corpus(vocabulary), token_bytes(vocabulary)
    documents, tokenized = [], []
    for ids in corpus.training + corpus.held_out:
        pieces = [spelled[token] or b"" for token in ids.tolist()]
        # SentencePiece puts a space before a text; it is none of its bytes.
        has_space = vocabulary == "32k" and pieces[1].startswith(b" ")
        lengths = np.array([len(piece) for piece in pieces], np.int32)
        lengths[1] -= has_space
        documents.append(Document((Segment("text", b"".join(pieces)[has_space:].decode()),)))
        tokenized.append(TokenizedDocument(ids, lengths, Proof.BYTES))
    return stage_text(documents), stage_tokens(tokenized), sum(map(len, corpus.training + corpus.held_out))


def uploaded(part: StagedPart) -> Callable[[], Part]:
    """Opens the part in a store in memory, anew each time."""
    storage = open_storage("memory://bench-store")
    upload(storage, part)
    return lambda: Part(storage, part.digest)


def _in_order(
    name: str,
    row_E: np.ndarray,
    ids_E: np.ndarray,
    truth_E: np.ndarray,
    draws_E: np.ndarray,
    step_nats: float,
    log_rest: np.ndarray,
    draw_weight: float | None,
    tail_step_nats: float | None = None,
    *,
    sampled_logprobs: bool = True,
) -> OurRows:
    """Entries by row, the first of each row before the others, these by (quanta, id)."""
    quanta_E = quantise(truth_E, step_nats)
    if tail_step_nats is not None:
        quanta_E = coarse_quanta(step_nats, tail_step_nats)[quanta_E]
    if not sampled_logprobs:
        quanta_E[draws_E > 0] = NOT_STORED
    first_E = np.zeros(len(row_E), bool)
    first_E[np.unique(row_E, return_index=True)[1]] = True
    order = np.lexsort((ids_E, quanta_E, ~first_E, row_E))
    offsets = offsets_of(np.bincount(row_E, minlength=len(log_rest)))
    rows = SparseRows(offsets, ids_E[order].astype(np.int32), quanta_E[order], draws_E[order], step_nats)
    return OurRows(name, rows, truth_E[order], log_rest, draw_weight, tail_step_nats)
