"""What the teachers say of the charged tokens of a batch: rows, the rows of open tokens, and spans.

Shapes: N charged tokens, K entries, C spans.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from logitstore.consumer.data import TeacherBlock, TeacherScalars, TrainingBlock
from logitstore.consumer.projection import without_unknown
from logitstore.consumer.rows import TeacherRows, partition_rows, sampled_rows
from logitstore.sparse import dequantise

MAX_WRITTEN = 3
"""Student tokens within a teacher's token that its row is asked for: vocabulary maps know four pieces of a token."""


@dataclass(frozen=True)
class SpanBatch:
    """What a teacher said of the spans of text that are charged whole: from one shared beginning to the next.

    Attributes:
        of_token: int64 [N], the span of each charged token; -1: it is in none.
        last: int64 [C], the charged token that ends each span.
        following: int64 [C], the charged token right after it; -1: none is, or it is in another piece.
        logprob: float32 [C], nats, of the whole span.
        first: float32 [N], nats, of the teacher's first token of the span that the token is in; NaN: it is in none.
        continuation: float32 [N], nats, of the rest of that span, given its first token.
        is_single: bool [N], the student, too, has one token for the span.
    """

    of_token: Tensor
    last: Tensor
    following: Tensor
    logprob: Tensor
    first: Tensor
    continuation: Tensor
    is_single: Tensor

    @property
    def num_spans(self) -> int:
        return len(self.logprob)


@dataclass(frozen=True)
class TeacherBatch:
    """One teacher's word on N charged tokens.

    Attributes:
        rows: of the teacher, over its own tokens (or over classes, where the signal was projected to the student's
            vocabulary when it was made); empty where it has none. Column 0 is the teacher's token of the text.
        has_row: bool [N].
        open_rows: of the teacher's token that might go on where the student's begins.
        num_written: int64 [N], student tokens from the beginning of that, at most ``MAX_WRITTEN``; 0: there is none.
        written: int64 [N, MAX_WRITTEN], these tokens, -1 after the last.
        spans: of the text.
        likeliest: int64 [N], the teacher's likeliest token; -1 for none. A class, where rows are over classes and
            there are no scalars.
        entropy: float32 [N], nats, of the teacher's next token; None if not known.
        top_logprob: float32 [N], nats, of the teacher's likeliest token.
        starts: float32 [N], nats, log of the mass of the teacher's tokens that start at a boundary; None if not known.
    """

    rows: TeacherRows
    has_row: Tensor
    open_rows: TeacherRows
    num_written: Tensor
    written: Tensor
    spans: SpanBatch
    likeliest: Tensor
    top_logprob: Tensor
    entropy: Tensor | None
    starts: Tensor | None


_Found = list[tuple[TeacherBlock, np.ndarray]]
"""Per bin, the teacher's block and the charged tokens [n]."""


def teacher_batch(
    chosen: list[tuple[TrainingBlock, np.ndarray]],
    number: int,
    pieces: np.ndarray,
    temperature: float,
    vocab_size: int | None,
) -> TeacherBatch:
    """One teacher's word.

    Args:
        chosen: per bin, its block and the charged tokens [n] of it.
        number: of the teacher.
        pieces: int64 [N], a number of the piece that each charged token is in.
        temperature: of the objective.
        vocab_size: how many of the ids that rows are over mean something to the student; None: all that they hold.
    """
    found = [(block.teachers[number], tokens) for block, tokens in chosen]
    rows, tensors = _rows([(block, block.row_of[tokens]) for block, tokens in found], temperature)
    has_row = (tensors[0] >= 0).any(-1)
    if vocab_size is not None and bool((tensors[0] >= vocab_size).any()):
        # Padding of the teacher's head, which the student's may not have: its mass belongs to the rest.
        rows = without_unknown(rows, vocab_size)
    num_written = np.concatenate([block.spans.num_written[tokens] for block, tokens in found])
    num_written[num_written > MAX_WRITTEN] = 0
    open_row_of = np.concatenate([block.open_row_of[tokens] for block, tokens in found])
    num_written[open_row_of < 0] = 0
    open_rows, _ = _rows([(block, block.open_row_of[tokens]) for block, tokens in found], temperature)
    entropy, argmax, argmax_logprob, starts = (_scalar(found, field.name) for field in fields(TeacherScalars))
    likeliest, top_logprob = _likeliest_entry(*tensors)
    return TeacherBatch(
        rows,
        has_row,
        open_rows,
        torch.from_numpy(num_written),
        torch.from_numpy(np.concatenate([_written(block.teachers[number], block, tokens) for block, tokens in chosen])),
        _span_batch(found, pieces),
        (likeliest if argmax is None else argmax).masked_fill(~has_row, -1),
        top_logprob if argmax_logprob is None else argmax_logprob,
        entropy,
        starts,
    )


def _written(teacher: TeacherBlock, block: TrainingBlock, tokens: np.ndarray) -> np.ndarray:
    """int64 [n, MAX_WRITTEN], see ``TeacherBatch``."""
    num_written = teacher.spans.num_written[tokens][:, None]
    place = np.arange(MAX_WRITTEN)[None, :]
    earlier = block.tokens.ids[np.clip(tokens[:, None] - num_written + place, 0, block.tokens.num_tokens - 1)]
    return np.where(place < num_written, earlier, -1).astype(np.int64)


def _span_batch(found: _Found, pieces: np.ndarray) -> SpanBatch:
    """Spans of which every token is charged, in one piece, and every token was scored."""
    first_of_bin = np.cumsum([0] + [len(block.spans.num_tokens) for block, _ in found])
    spans = [block.spans for block, _ in found]
    of_token = np.concatenate(
        [
            np.where((span := each.of_token[tokens]) >= 0, span + first, -1)
            for each, (_, tokens), first in zip(spans, found, first_of_bin[:-1], strict=True)
        ]
    )
    size, logprob, continuation = (
        np.concatenate([getattr(each, name) for each in spans]) for name in ("num_tokens", "logprob", "continuation")
    )
    # A span may be met in two pieces, and a block in two bins: what counts is a run of one span in one piece.
    inside = np.flatnonzero(of_token >= 0)
    begins = np.flatnonzero(np.diff(of_token[inside], prepend=-1) | np.diff(pieces[inside], prepend=-1))
    lengths = np.diff(np.append(begins, len(inside)))
    span = of_token[inside[begins]]
    whole = (lengths == size[span]) & np.isfinite(logprob[span])
    begins, lengths, span = begins[whole], lengths[whole], span[whole]
    members, last = inside[np.repeat(begins, lengths) + _within(lengths)], inside[begins + lengths - 1]
    number = np.full(len(of_token), -1, np.int64)
    number[members] = np.repeat(np.arange(len(begins)), lengths)
    tokens = np.concatenate([tokens for _, tokens in found])
    after = np.minimum(last + 1, len(pieces) - 1)
    follows = (after > last) & (pieces[after] == pieces[last]) & (tokens[after] == tokens[last] + 1)
    on_tokens = np.full((2, len(of_token)), np.nan, np.float32)
    on_tokens[:, members] = np.repeat([logprob[span] - continuation[span], continuation[span]], lengths, axis=1)
    is_single = np.zeros(len(of_token), bool)
    is_single[last[lengths == 1]] = True
    values = (number, last, np.where(follows, after, -1), logprob[span], *on_tokens, is_single)
    return SpanBatch(*map(torch.from_numpy, values))


def _rows(found: _Found, temperature: float) -> tuple[TeacherRows, list[Tensor]]:
    """Rows by their numbers (-1: an empty one), and their ids, log-probs and draws as they are stored, [N, K]."""
    counts = np.concatenate([_counts(block, rows) for block, rows in found])
    slots = np.arange(max(1, counts.max(initial=0)))[None, :] < counts[:, None]
    ids, logprobs, draws = (np.full(slots.shape, fill, kind) for fill, kind in _FILLS)
    flat = [_entries(block, rows) for block, rows in found]
    for table, parts in zip((ids, logprobs, draws), zip(*flat, strict=True), strict=True):
        table[slots] = np.concatenate(parts)
    tensors = [torch.from_numpy(table) for table in (ids, logprobs, draws)]
    signal = found[0][0].signal
    if signal.draw_weight is not None:
        return sampled_rows(tensors[0], tensors[1], tensors[2], signal.draw_weight, temperature), tensors
    column = signal.temperatures.index(temperature)
    rest = np.concatenate([_at(block.signal.rest[:, column], rows, -np.inf) for block, rows in found])
    return partition_rows(tensors[0], tensors[1], torch.from_numpy(rest), temperature), tensors


_FILLS = ((-1, np.int64), (-np.inf, np.float32), (0, np.int32))


def _counts(block: TeacherBlock, rows: np.ndarray) -> np.ndarray:
    offsets = block.signal.rows.offsets
    return np.where(rows >= 0, offsets[rows + 1] - offsets[rows], 0)


def _entries(block: TeacherBlock, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, log-probs and draws of the entries of some rows, concatenated."""
    sparse, kept = block.signal.rows, rows[rows >= 0]
    begins, counts = sparse.offsets[kept], sparse.offsets[kept + 1] - sparse.offsets[kept]
    picked = np.repeat(begins, counts) + _within(counts)
    # Only what was picked is decoded: a block has many times the entries of a bin.
    return sparse.ids[picked], dequantise(sparse.quanta[picked], sparse.step_nats), sparse.draws[picked]


def _within(counts: np.ndarray) -> np.ndarray:
    """0 .. count - 1 of each of some runs, concatenated."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _likeliest_entry(ids_NK: Tensor, logprobs_NK: Tensor, draws_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token, which every selection keeps for certain (int64 [N]; ties by id), and its log-prob.

    Not the entry of most mass: where the distribution is flat, a sampled one weighs more than the likeliest.
    """
    certain_NK = logprobs_NK.masked_fill(draws_NK > 0, -torch.inf)
    top_N1 = certain_NK.amax(-1, keepdim=True)
    is_top_NK = (certain_NK == top_N1) & (ids_NK >= 0)
    likeliest_N = ids_NK.masked_fill(~is_top_NK, torch.iinfo(torch.int64).max).amin(-1)
    return likeliest_N.masked_fill(~is_top_NK.any(-1), -1), top_N1[:, 0]


def _at(values: np.ndarray, rows: np.ndarray, fill: float) -> np.ndarray:
    return np.where(rows >= 0, values[rows], np.float32(fill)).astype(np.float32)


def _scalar(found: _Found, name: str) -> Tensor | None:
    known = [(block.scalars, tokens) for block, tokens in found if block.scalars is not None]
    if len(known) < len(found):
        return None
    return torch.from_numpy(np.concatenate([getattr(scalars, name)[tokens] for scalars, tokens in known]))
