"""Bins to tensors: one batch of packed sequences, and the teachers' words for every charged token in it.

Shapes: B sequences, L their length, N charged tokens, K entries, C spans.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from logitstore.consumer.bins import Bin
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
        open_rows: of the teacher's token that might go on where the student's begins; None if no one asks for them.
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


@dataclass(frozen=True)
class Batch:
    """Packed sequences.

    Attributes:
        input_ids: int64 [B, L].
        position_ids: int64 [B, L], restarting with each piece; that is what keeps documents apart.
        outputs: int64 [N], positions in the flattened [B * L] whose output predicts a charged token.
        targets: int64 [N], the charged tokens.
        teachers: in the order of the data's teachers.
        num_bytes: canonical bytes of the charged tokens.
        num_tokens: input tokens, without padding.
    """

    input_ids: Tensor
    position_ids: Tensor
    outputs: Tensor
    targets: Tensor
    teachers: tuple[TeacherBatch, ...]
    num_bytes: int
    num_tokens: int

    @property
    def num_charged(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device | str) -> Batch:
        return _moved(self, device)


def collate(
    bins: list[tuple[TrainingBlock, Bin]], sequence_length: int, temperature: float, vocab_sizes: list[int | None]
) -> Batch:
    """Make a batch.

    Args:
        bins: each with the block that it is of.
        sequence_length: L.
        temperature: of the objective; decides which stored mass outside the rows is read.
        vocab_sizes: per teacher, how many of the ids that its rows are over mean something to the student; None: all
            that they hold.
    """
    input_ids = np.zeros((len(bins), sequence_length), np.int64)
    position_ids = np.zeros((len(bins), sequence_length), np.int64)
    outputs, charged, pieces_of, num_bytes, num_tokens = [], [], [], 0, 0
    for line, (block, pieces) in enumerate(bins):
        column = 0
        chosen = []
        for number, piece in enumerate(pieces):
            size = piece.num_tokens - 1
            input_ids[line, column : column + size] = block.tokens.ids[piece.begin : piece.end - 1]
            position_ids[line, column : column + size] = np.arange(size)
            predicted = np.flatnonzero(block.charged[piece.begin + 1 : piece.end])
            outputs.append(line * sequence_length + column + predicted)
            chosen.append(piece.begin + 1 + predicted)
            pieces_of.append(np.full(len(predicted), line * sequence_length + number))
            column += size
        position_ids[line, column:] = np.arange(sequence_length - column)  # padding is a document of its own
        num_tokens += column
        charged.append(np.concatenate(chosen))
        num_bytes += int(block.tokens.byte_lengths[charged[-1]].sum())
    chosen_ids = [block.tokens.ids[tokens] for (block, _), tokens in zip(bins, charged, strict=True)]
    pieces = np.concatenate(pieces_of)
    teachers = []
    for number, vocab_size in enumerate(vocab_sizes):
        found = [(block.teachers[number], tokens) for (block, _), tokens in zip(bins, charged, strict=True)]
        written = [
            _written(block.teachers[number], block, tokens) for (block, _), tokens in zip(bins, charged, strict=True)
        ]
        teachers.append(_teacher_batch(found, pieces, np.concatenate(written), temperature, vocab_size))
    return Batch(
        torch.from_numpy(input_ids),
        torch.from_numpy(position_ids),
        torch.from_numpy(np.concatenate(outputs).astype(np.int64)),
        torch.from_numpy(np.concatenate(chosen_ids).astype(np.int64)),
        tuple(teachers),
        num_bytes,
        num_tokens,
    )


_Found = list[tuple[TeacherBlock, np.ndarray]]
"""Per bin, the teacher's block and the charged tokens [n]."""


def _written(teacher: TeacherBlock, block: TrainingBlock, tokens: np.ndarray) -> np.ndarray:
    """int64 [n, MAX_WRITTEN], see ``TeacherBatch``."""
    num_written = teacher.spans.num_written[tokens][:, None]
    place = np.arange(MAX_WRITTEN)[None, :]
    earlier = block.tokens.ids[np.clip(tokens[:, None] - num_written + place, 0, block.tokens.num_tokens - 1)]
    return np.where(place < num_written, earlier, -1).astype(np.int64)


def _teacher_batch(
    found: _Found, pieces: np.ndarray, written: np.ndarray, temperature: float, vocab_size: int | None
) -> TeacherBatch:
    """``pieces``: int64 [N], a number of the piece that each charged token is in."""
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
        torch.from_numpy(written),
        _span_batch(found, pieces),
        (likeliest if argmax is None else argmax).masked_fill(~has_row, -1),
        top_logprob if argmax_logprob is None else argmax_logprob,
        entropy,
        starts,
    )


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


_Part = TypeVar("_Part", Batch, TeacherBatch, SpanBatch)


def _moved(part: _Part, device: torch.device | str) -> _Part:
    """The same with all that it holds on another device."""
    there: dict[str, Any] = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Tensor | TeacherRows):
            there[field.name] = value.to(device)
        elif isinstance(value, SpanBatch):
            there[field.name] = _moved(value, device)
        elif isinstance(value, tuple):
            there[field.name] = tuple(_moved(each, device) for each in value)
    return replace(part, **there)
