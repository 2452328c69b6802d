"""Bins to tensors: one batch of packed sequences, and the teachers' rows for every charged token in it.

Shapes: B sequences, L their length, N charged tokens, K entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from logitstore.consumer.bins import Bin
from logitstore.consumer.data import TeacherBlock, TrainingBlock
from logitstore.consumer.projection import class_of, project_rows
from logitstore.consumer.rows import TeacherRows, partition_rows, sampled_rows
from logitstore.sparse import dequantise
from logitstore.vocabulary_classes import VocabularyClasses


@dataclass(frozen=True)
class TeacherBatch:
    """One teacher's word on N charged tokens.

    Attributes:
        rows: of the teacher; empty where it has none.
        has_row: bool [N].
        entropy: float32 [N], nats; None if not known.
        logprob: float32 [N], nats, of the realised token; None if not known.
        likeliest: int64 [N], the teacher's likeliest token, or its class if the rows are over classes; -1 for none.
    """

    rows: TeacherRows
    has_row: Tensor
    entropy: Tensor | None
    logprob: Tensor | None
    likeliest: Tensor

    def to(self, device: torch.device | str) -> TeacherBatch:
        entropy, logprob = (None if x is None else x.to(device) for x in (self.entropy, self.logprob))
        likeliest = self.likeliest.to(device)
        return TeacherBatch(self.rows.to(device), self.has_row.to(device), entropy, logprob, likeliest)


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
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            outputs=self.outputs.to(device),
            targets=self.targets.to(device),
            teachers=tuple(teacher.to(device) for teacher in self.teachers),
        )


def collate(
    bins: list[tuple[TrainingBlock, Bin]],
    sequence_length: int,
    temperature: float,
    classes: Sequence[VocabularyClasses | None],
    vocab_size: int,
) -> Batch:
    """Make a batch.

    Args:
        bins: each with the block that it is of.
        sequence_length: L.
        temperature: of the objective; decides which stored mass outside the rows is read.
        classes: per teacher, the partition shared with its vocabulary; None if it has the student's own tokens.
        vocab_size: of the student's tokenizer.
    """
    input_ids = np.zeros((len(bins), sequence_length), np.int64)
    position_ids = np.zeros((len(bins), sequence_length), np.int64)
    outputs, charged, num_bytes, num_tokens = [], [], 0, 0
    for line, (block, pieces) in enumerate(bins):
        column = 0
        chosen = []
        for piece in pieces:
            size = piece.num_tokens - 1
            input_ids[line, column : column + size] = block.tokens.ids[piece.begin : piece.end - 1]
            position_ids[line, column : column + size] = np.arange(size)
            predicted = np.flatnonzero(block.charged[piece.begin + 1 : piece.end])
            outputs.append(line * sequence_length + column + predicted)
            chosen.append(piece.begin + 1 + predicted)
            column += size
        position_ids[line, column:] = np.arange(sequence_length - column)  # padding is a document of its own
        num_tokens += column
        charged.append(np.concatenate(chosen))
        num_bytes += int(block.tokens.byte_lengths[charged[-1]].sum())
    chosen_ids = [block.tokens.ids[rows] for (block, _), rows in zip(bins, charged, strict=True)]
    targets = torch.from_numpy(np.concatenate(chosen_ids).astype(np.int64))
    return Batch(
        torch.from_numpy(input_ids),
        torch.from_numpy(position_ids),
        torch.from_numpy(np.concatenate(outputs).astype(np.int64)),
        targets,
        tuple(
            _teacher_batch(
                [(block.teachers[number], rows) for (block, _), rows in zip(bins, charged, strict=True)],
                targets,
                temperature,
                classes[number],
                vocab_size,
            )
            for number in range(len(classes))
        ),
        num_bytes,
        num_tokens,
    )


def _teacher_batch(
    found: list[tuple[TeacherBlock, np.ndarray]],
    targets: Tensor,
    temperature: float,
    classes: VocabularyClasses | None,
    vocab_size: int,
) -> TeacherBatch:
    """``found``: per bin, the teacher's block and the charged tokens [n]."""
    row_of = [block.row_of[tokens] for block, tokens in found]
    counts = np.concatenate([_counts(block, rows) for (block, _), rows in zip(found, row_of, strict=True)])
    slots = np.arange(max(1, counts.max(initial=0)))[None, :] < counts[:, None]
    ids, logprobs, draws = (np.full(slots.shape, fill, kind) for fill, kind in _FILLS)
    flat = [_entries(block, rows) for (block, _), rows in zip(found, row_of, strict=True)]
    for table, parts in zip((ids, logprobs, draws), zip(*flat, strict=True), strict=True):
        table[slots] = np.concatenate(parts)
    tensors = [torch.from_numpy(table) for table in (ids, logprobs, draws)]
    draw_weight = found[0][0].signal.draw_weight
    if draw_weight is None:
        column = found[0][0].signal.temperatures.index(temperature)
        rest = np.concatenate(
            [_at(b.signal.rest[:, column], r, -np.inf) for (b, _), r in zip(found, row_of, strict=True)]
        )
        rows = partition_rows(tensors[0], tensors[1], torch.from_numpy(rest), temperature)
    else:
        rows = sampled_rows(tensors[0], tensors[1], tensors[2], draw_weight, temperature)
    has_row = torch.from_numpy(counts > 0)
    if classes is not None:
        teacher_class = torch.from_numpy(classes.teacher_class)
        rows = project_rows(rows, teacher_class)
        # Where the tokenizers disagree on the class of what comes next, the row speaks of something else.
        realised_class = torch.from_numpy(classes.student_class)[targets]
        has_row &= (rows.ids_NK == realised_class[:, None]).any(-1)
    elif ids.max(initial=-1) >= vocab_size:
        # Padding of the teacher's head, which the student's may not have: its mass belongs to the rest.
        rows = project_rows(rows, torch.arange(vocab_size))
    entropy, logprob, argmax = (
        _scalar([(getattr(block, name), chosen) for block, chosen in found])
        for name in ("entropy", "logprob", "argmax")
    )
    likeliest = _likeliest_entry(*tensors) if argmax is None else argmax
    if classes is not None:
        likeliest = class_of(likeliest, teacher_class)
    return TeacherBatch(rows, has_row, entropy, logprob, likeliest.masked_fill(~has_row, -1))


_FILLS = ((-1, np.int64), (-np.inf, np.float32), (0, np.int32))


def _counts(block: TeacherBlock, rows: np.ndarray) -> np.ndarray:
    offsets = block.signal.rows.offsets
    return np.where(rows >= 0, offsets[rows + 1] - offsets[rows], 0)


def _entries(block: TeacherBlock, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, log-probs and draws of the entries of some rows, concatenated."""
    sparse, kept = block.signal.rows, rows[rows >= 0]
    begins, counts = sparse.offsets[kept], sparse.offsets[kept + 1] - sparse.offsets[kept]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    picked = np.repeat(begins, counts) + within
    # Only what was picked is decoded: a block has many times the entries of a bin.
    return sparse.ids[picked], dequantise(sparse.quanta[picked], sparse.step_nats), sparse.draws[picked]


def _likeliest_entry(ids_NK: Tensor, logprobs_NK: Tensor, draws_NK: Tensor) -> Tensor:
    """int64 [N]: the likeliest token, which every selection keeps for certain; ties by id.

    Not the entry of most mass: where the distribution is flat, a sampled one weighs more than the likeliest.
    """
    certain_NK = logprobs_NK.masked_fill(draws_NK > 0, -torch.inf)
    is_top_NK = (certain_NK == certain_NK.amax(-1, keepdim=True)) & (ids_NK >= 0)
    likeliest_N = ids_NK.masked_fill(~is_top_NK, torch.iinfo(torch.int64).max).amin(-1)
    return likeliest_N.masked_fill(~is_top_NK.any(-1), -1)


def _at(values: np.ndarray, rows: np.ndarray, fill: float) -> np.ndarray:
    return np.where(rows >= 0, values[rows], np.float32(fill)).astype(np.float32)


def _scalar(found: list[tuple[np.ndarray | None, np.ndarray]]) -> Tensor | None:
    if any(values is None for values, _ in found):
        return None
    return torch.from_numpy(np.concatenate([values[tokens] for values, tokens in found if values is not None]))
