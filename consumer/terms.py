"""The terms of an objective that a teacher has a say in: what each asks of the student's head, and what it charges.

A term answers for the tokens that it can speak of, one loss for each, in nats. The others are left to the text. Where a
term speaks of the class of a token only, it charges the rest of the cross-entropy, -log q(token | class), beside.

Shapes: N positions, K entries, V the student's vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from logitstore.consumer.batches import Batch
from logitstore.consumer.divergences import rest_cross_entropy, teacher_loss
from logitstore.consumer.open_tokens import continuations, log_mass_that_begins_with
from logitstore.consumer.projected_kl import split_realised, within_class
from logitstore.consumer.projection import class_of, merge_classes, student_groups
from logitstore.consumer.rows import TeacherRows
from logitstore.consumer.student_head import StudentHead
from logitstore.consumer.teacher_batches import TeacherBatch
from logitstore.vocabulary_classes import VocabularyClasses


class Charge(NamedTuple):
    """What a term charges.

    Attributes:
        loss_N: nats; read only where the term speaks.
        speaks_N: bool.
        divergence_N: the part of the loss that compares student and teacher, for the record.
    """

    loss_N: Tensor
    speaks_N: Tensor
    divergence_N: Tensor


class Term(Protocol):
    """One way to learn from one teacher."""

    def __call__(self, head: StudentHead, batch: Batch, teacher: TeacherBatch) -> Charge: ...


class TokenKl:
    """``kl`` to a teacher with the student's own tokens."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def __call__(self, head: StudentHead, batch: Batch, teacher: TeacherBatch) -> Charge:
        kl_N = teacher_loss(teacher.rows, head(teacher.rows.ids_NK, temperature=self.temperature), self.temperature)
        return Charge(kl_N, teacher.has_row, kl_N)


class ClassKl:
    """KL on a common partition of two vocabularies: ``projected_kl``, and more coarsely ``first_byte_kl``."""

    def __init__(
        self,
        classes: VocabularyClasses,
        head_rows: int,
        temperature: float,
        device: torch.device,
        *,
        teacher_pieces: NDArray[np.int32] | None = None,
        projected_nats: float | None = None,
    ) -> None:
        """
        Args:
            classes: the partition.
            head_rows: of the student's head.
            temperature: of the objective.
            device: of the student.
            teacher_pieces: [U, P] student tokens that each teacher token is cut into: then rows speak of student tokens
                inside a teacher's token, too (``open_tokens``), and of one that the teacher writes with several.
            projected_nats: the rows are over classes already, and this is how far their masses and the log-probs of
                tokens can be apart by rounding alone.
        """
        groups, self.num_groups = student_groups(classes, head_rows)
        self.groups = groups.to(device)
        self.teacher_class = torch.tensor(classes.teacher_class).to(device)
        self.pieces_UP = None if teacher_pieces is None else torch.tensor(teacher_pieces).long().to(device)
        self.projected_nats, self.temperature = projected_nats, temperature

    def __call__(self, head: StudentHead, batch: Batch, teacher: TeacherBatch) -> Charge:
        events = self._events(batch, teacher)
        realised_N = self.groups[batch.targets]
        speaks_N = events.speaks_N & (events.first_N == realised_N)
        rows = events.rows
        is_realised_NK = (rows.ids_NK == realised_N[:, None]) & speaks_N[:, None]
        of_classes = partial(head, rows.ids_NK, groups=self.groups, num_groups=self.num_groups)
        at_one = of_classes(realised_cell=True)
        within_N = within_class(at_one, is_realised_NK)
        if self.temperature != 1.0:
            kl_N = teacher_loss(rows, of_classes(temperature=self.temperature), self.temperature)
            return Charge(kl_N + within_N, speaks_N, kl_N)
        log_realised_N = events.log_realised_N.masked_fill(~speaks_N, torch.nan)
        within_N = within_N.masked_fill(log_realised_N.isfinite(), 0.0)
        rows, outputs = split_realised(rows, at_one, is_realised_NK, log_realised_N)
        kl_N = teacher_loss(rows, outputs)
        if rows.is_sample:
            kl_N = kl_N + rest_cross_entropy(events.log_rest_N, outputs)
        return Charge(kl_N + within_N, speaks_N, kl_N)

    def _events(self, batch: Batch, teacher: TeacherBatch) -> _Events:
        rows, no_rest_N = teacher.rows, torch.full_like(teacher.spans.first, -torch.inf)
        if self.projected_nats is not None:
            return _Events(rows, rows.ids_NK[:, 0], teacher.has_row, self._log_chain(teacher), no_rest_N)
        classes_NK = class_of(rows.ids_NK, self.teacher_class)
        if self.pieces_UP is None or self.temperature != 1.0:
            unknown_N = torch.full_like(teacher.spans.first, torch.nan)
            return _Events(merge_classes(rows, classes_NK), classes_NK[:, 0], teacher.has_row, unknown_N, no_rest_N)
        found = continuations(teacher.open_rows, self.pieces_UP, teacher.written, teacher.num_written, teacher.has_row)
        inner_N = ~teacher.has_row & (teacher.num_written > 0)
        open_classes_NK = class_of(found.next_NK, self.groups)
        log_rest_N = found.log_end_N.masked_fill(~inner_N, -torch.inf)
        rest_N = None
        if rows.log_rest_N is not None:
            rest_N = torch.where(inner_N, log_rest_N, rows.log_rest_N + found.log_end_N)
        mixed = TeacherRows(
            torch.cat([rows.ids_NK, teacher.open_rows.ids_NK], -1),
            torch.cat([rows.log_masses_NK + found.log_end_N[:, None], found.log_masses_NK], -1),
            rest_N,
        )
        # Of longer tokens only those of its own class: others stand in theirs.
        is_own_NK = classes_NK == self.groups[batch.targets][:, None]
        begins_N = log_mass_that_begins_with(rows, self.pieces_UP, batch.targets, is_own_NK)
        is_next_NK = found.next_NK == batch.targets[:, None]
        goes_on_N = found.log_masses_NK.masked_fill(~is_next_NK, -torch.inf).logsumexp(-1)
        return _Events(
            merge_classes(mixed, torch.cat([classes_NK, open_classes_NK], -1)),
            torch.where(inner_N, open_classes_NK[:, 0], classes_NK[:, 0]),
            teacher.has_row | inner_N,
            torch.logaddexp(torch.logaddexp(self._log_chain(teacher), begins_N) + found.log_end_N, goes_on_N),
            log_rest_N,
        )

    def _log_chain(self, teacher: TeacherBatch) -> Tensor:
        """[N] log-prob of the realised token, nats, where the teacher writes it with several; NaN elsewhere."""
        spans = teacher.spans
        is_several_N = teacher.has_row & spans.is_single & (spans.continuation < 0.0)
        return (self._log_first(teacher) + spans.continuation).masked_fill(~is_several_N, torch.nan)

    def _log_first(self, teacher: TeacherBatch) -> Tensor:
        """[N] log-prob of the teacher's token of the text, nats, in the measure of the row's masses."""
        log_mass_N = teacher.rows.log_masses_NK[:, 0]
        if self.projected_nats is None:
            return log_mass_N
        # The first entry is the token's class. What sets them apart may be no more than rounding.
        is_alone_N = (log_mass_N - teacher.spans.first).abs() <= self.projected_nats
        return torch.where(is_alone_N, log_mass_N, teacher.spans.first)


class _Events(NamedTuple):
    """A teacher's word in terms of classes.

    Attributes:
        rows: over classes.
        first_N: int64, the class of what the teacher's text goes on with.
        speaks_N: bool, there is a row.
        log_realised_N: nats, log-prob of the student's realised token, where it is to be a cell of its own; else NaN.
    """

    rows: TeacherRows
    first_N: Tensor
    speaks_N: Tensor
    log_realised_N: Tensor
    log_rest_N: Tensor
