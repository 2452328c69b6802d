"""Bins to tensors: one batch of packed sequences, and the teachers' rows for every charged token in it.

Shapes: B sequences, L their length, N charged tokens, K entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from logitstore.consumer.bins import Bin
from logitstore.consumer.data import TeacherBlock, TeacherColumns, TrainingBlock
from logitstore.consumer.projection import project_rows
from logitstore.consumer.rows import TeacherRows, partition_rows, sampled_rows
from logitstore.errors import TrainingError


@dataclass(frozen=True)
class TeacherBatch:
    """One teacher's word on N charged tokens.

    Attributes:
        rows: of the teacher; empty where it has none.
        has_row: bool [N].
        entropy: float32 [N], nats; None if not known.
        logprob: float32 [N], nats, of the realised token; None if not known.
    """

    rows: TeacherRows
    has_row: Tensor
    entropy: Tensor | None
    logprob: Tensor | None

    def to(self, device: torch.device | str) -> TeacherBatch:
        entropy, logprob = (None if x is None else x.to(device) for x in (self.entropy, self.logprob))
        return TeacherBatch(self.rows.to(device), self.has_row.to(device), entropy, logprob)


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
    teachers: tuple[TeacherColumns, ...],
    sequence_length: int,
    temperature: float,
    teacher_classes: list[Tensor | None],
) -> Batch:
    """Make a batch.

    Args:
        bins: each with the block that it is of.
        teachers: of the data.
        sequence_length: L.
        temperature: of the objective; decides which stored mass outside the rows is read.
        teacher_classes: per teacher, int64 [V_teacher] class of each token, None for the student's own tokens.
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
    targets = np.concatenate([block.tokens.ids[rows] for (block, _), rows in zip(bins, charged, strict=True)])
    return Batch(
        torch.from_numpy(input_ids),
        torch.from_numpy(position_ids),
        torch.from_numpy(np.concatenate(outputs).astype(np.int64)),
        torch.from_numpy(targets.astype(np.int64)),
        tuple(
            _teacher_batch(
                [(block.teachers[number], rows) for (block, _), rows in zip(bins, charged, strict=True)],
                columns,
                temperature,
                teacher_classes[number],
            )
            for number, columns in enumerate(teachers)
        ),
        num_bytes,
        num_tokens,
    )


def _teacher_batch(
    found: list[tuple[TeacherBlock, np.ndarray]],
    columns: TeacherColumns,
    temperature: float,
    teacher_class: Tensor | None,
) -> TeacherBatch:
    """``found``: per bin, the teacher's block and the charged tokens [n]."""
    row_of = [block.row_of[tokens] for block, tokens in found]
    counts = np.concatenate([_counts(block, rows) for (block, _), rows in zip(found, row_of, strict=True)])
    slots = np.arange(max(1, counts.max(initial=0)))[None, :] < counts[:, None]
    ids, logprobs, sampled = (np.full(slots.shape, fill, kind) for fill, kind in _FILLS)
    flat = [_entries(block, rows) for (block, _), rows in zip(found, row_of, strict=True)]
    for table, parts in zip((ids, logprobs, sampled), zip(*flat, strict=True), strict=True):
        table[slots] = np.concatenate(parts)
    tensors = [torch.from_numpy(table) for table in (ids, logprobs, sampled)]
    theta = found[0][0].signal.theta
    if theta is None:
        column = _temperature_column(columns, found[0][0], temperature)
        rest = np.concatenate(
            [_at(b.signal.rest[:, column], r, -np.inf) for (b, _), r in zip(found, row_of, strict=True)]
        )
        rows = partition_rows(tensors[0], tensors[1], torch.from_numpy(rest), temperature)
    else:
        rows = sampled_rows(tensors[0], tensors[1], tensors[2], theta, temperature)
    if teacher_class is not None:
        rows = project_rows(rows, teacher_class)
    has_row = torch.from_numpy(counts > 0)
    entropy, logprob = (_scalar([(getattr(b, name), t) for b, t in found]) for name in ("entropy", "logprob"))
    return TeacherBatch(rows, has_row, entropy, logprob)


_FILLS = ((-1, np.int64), (-np.inf, np.float32), (False, bool))


def _counts(block: TeacherBlock, rows: np.ndarray) -> np.ndarray:
    return np.where(rows >= 0, block.signal.rows.counts[rows], 0)


def _entries(block: TeacherBlock, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, log-probs and sampled flags of the entries of some rows, concatenated."""
    sparse, kept = block.signal.rows, rows[rows >= 0]
    begins, counts = sparse.offsets[kept], sparse.counts[kept]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    picked = np.repeat(begins, counts) + within
    return sparse.ids[picked], sparse.logprobs()[picked], sparse.sampled[picked]


def _at(values: np.ndarray, rows: np.ndarray, fill: float) -> np.ndarray:
    return np.where(rows >= 0, values[rows], np.float32(fill)).astype(np.float32)


def _scalar(found: list[tuple[np.ndarray | None, np.ndarray]]) -> Tensor | None:
    if any(values is None for values, _ in found):
        return None
    return torch.from_numpy(np.concatenate([values[tokens] for values, tokens in found if values is not None]))


def _temperature_column(columns: TeacherColumns, block: TeacherBlock, temperature: float) -> int:
    if temperature not in block.signal.temperatures:
        known = ", ".join(f"{t:g}" for t in block.signal.temperatures)
        raise TrainingError(
            f"teacher {columns.name!r}: its mass outside the rows is stored for temperature {known}, not "
            f"{temperature:g}; produce again with `--temperatures 1,{temperature:g}`, or train at one of these"
        )
    return block.signal.temperatures.index(temperature)
