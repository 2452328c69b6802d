"""Bins to tensors: one batch of packed sequences, and the teachers' words for every charged token in it.

Shapes: B sequences, L their length, N charged tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from logitstore.consumer.bins import Bin
from logitstore.consumer.data import TrainingBlock
from logitstore.consumer.teacher_batches import TeacherBatch, teacher_batch


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

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        return _mapped(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """What a ``DataLoader`` calls for batches on their way to a GPU."""
        return _mapped(self, Tensor.pin_memory)


def count_charged(bins: list[tuple[TrainingBlock, Bin]]) -> int:
    """How many tokens of these bins carry a loss, without making their batch."""
    return sum(int(block.charged[piece.begin + 1 : piece.end].sum()) for block, pieces in bins for piece in pieces)


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
    pieces = np.concatenate(pieces_of)
    charged_of = [(block, tokens) for (block, _), tokens in zip(bins, charged, strict=True)]
    teachers = (
        teacher_batch(charged_of, number, pieces, temperature, vocab_size)
        for number, vocab_size in enumerate(vocab_sizes)
    )
    return Batch(
        torch.from_numpy(input_ids),
        torch.from_numpy(position_ids),
        torch.from_numpy(np.concatenate(outputs).astype(np.int64)),
        torch.from_numpy(np.concatenate([block.tokens.ids[tokens] for block, tokens in charged_of]).astype(np.int64)),
        tuple(teachers),
        num_bytes,
        num_tokens,
    )


_Part = TypeVar("_Part")


def _mapped(part: _Part, change: Callable[[Tensor], Tensor]) -> _Part:
    """The same with all tensors that it holds changed."""
    found: Any = part
    if isinstance(part, Tensor):
        found = change(part)
    elif isinstance(part, tuple):
        found = tuple(_mapped(each, change) for each in part)
    elif is_dataclass(part) and not isinstance(part, type):
        values = {field.name: _mapped(getattr(part, field.name), change) for field in fields(part)}
        found = replace(part, **values)
    return found
