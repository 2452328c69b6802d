"""The terms of an objective that a teacher has a say in: what each asks of the student's head, and what it charges.

A term answers for the tokens that it can speak of, one loss for each, in nats. The others are left to the text. Where a
term speaks of the class of a token only, it charges the rest of the cross-entropy, -log q(token | class), beside.

Shapes: N positions, K entries, V the student's vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from logitstore.consumer.batches import Batch, TeacherBatch
from logitstore.consumer.divergences import teacher_loss
from logitstore.consumer.projected_kl import split_realised, within_class
from logitstore.consumer.projection import class_of, project_rows, student_groups
from logitstore.consumer.student_head import StudentHead
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
    """KL on a common partition of two vocabularies: ``projected_kl``, and without the chain rule ``first_byte_kl``."""

    def __init__(
        self,
        classes: VocabularyClasses,
        head_rows: int,
        temperature: float,
        device: torch.device,
        *,
        projected_nats: float | None = None,
        by_chain_rule: bool = True,
    ) -> None:
        """
        Args:
            classes: the partition.
            head_rows: of the student's head.
            temperature: of the objective.
            device: of the student.
            projected_nats: the rows are over classes already, and this is how far their masses and the log-probs of
                tokens can be apart by rounding alone.
            by_chain_rule: make the realised token a cell of its own where the teacher's log-prob of it is known. Chain
                rule and temperature do not go together: P^(1/T) of a text is not normalised over the texts.
        """
        groups, self.num_groups = student_groups(classes, head_rows)
        self.groups = groups.to(device)
        self.teacher_class = torch.tensor(classes.teacher_class).to(device)
        self.projected_nats = projected_nats
        self.temperature = temperature
        self.by_chain_rule = by_chain_rule and temperature == 1.0

    def __call__(self, head: StudentHead, batch: Batch, teacher: TeacherBatch) -> Charge:
        rows, first_N = teacher.rows, teacher.rows.ids_NK[:, 0]
        if self.projected_nats is None:
            rows, first_N = project_rows(rows, self.teacher_class), class_of(first_N, self.teacher_class)
        realised_N = self.groups[batch.targets]
        speaks_N = teacher.has_row & (first_N == realised_N)
        is_realised_NK = (rows.ids_NK == realised_N[:, None]) & speaks_N[:, None]
        of_classes = partial(head, rows.ids_NK, groups=self.groups, num_groups=self.num_groups)
        at_one = of_classes(realised_cell=True)
        within_N = within_class(at_one, is_realised_NK)
        if self.temperature != 1.0:
            kl_N = teacher_loss(rows, of_classes(temperature=self.temperature), self.temperature)
            return Charge(kl_N + within_N, speaks_N, kl_N)
        log_realised_N = torch.full_like(within_N, torch.nan)
        if self.by_chain_rule:
            log_realised_N = self._log_first(teacher) + teacher.spans.continuation
            log_realised_N = log_realised_N.masked_fill(~(teacher.spans.is_single & speaks_N), torch.nan)
            within_N = within_N.masked_fill(log_realised_N.isfinite(), 0.0)
        kl_N = teacher_loss(*split_realised(rows, at_one, is_realised_NK, log_realised_N))
        return Charge(kl_N + within_N, speaks_N, kl_N)

    def _log_first(self, teacher: TeacherBatch) -> Tensor:
        """[N] log-prob of the teacher's token of the text, nats, in the measure of the row's masses."""
        log_mass_N = teacher.rows.log_masses_NK[:, 0]
        if self.projected_nats is None:
            return log_mass_N
        # The first entry is the token's class. What sets them apart may be no more than rounding.
        is_alone_N = (log_mass_N - teacher.spans.first).abs() <= self.projected_nats
        return torch.where(is_alone_N, log_mass_N, teacher.spans.first)
