"""A batch's loss: the terms of the objective, summed over tokens, for one global denominator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from logitstore.consumer.batches import Batch
from logitstore.consumer.objectives import CHARGED_BY_SPAN, Objective
from logitstore.consumer.student import Student
from logitstore.consumer.student_head import StudentHead
from logitstore.consumer.teacher_columns import TeacherColumns
from logitstore.consumer.teacher_weighting import require_scores, teacher_shares
from logitstore.consumer.term_registry import make_term
from logitstore.errors import ConfigError


@dataclass(frozen=True)
class LossSums:
    """Sums over a batch's charged tokens, in nats; divide by the global number of charged tokens."""

    total: Tensor
    """What is minimised, with its gradient."""
    terms: dict[str, Tensor]
    """``ce``, ``<term>/<teacher>``, unweighted, and where shares vary ``share/<teacher>``; detached."""
    num_spoken: dict[str, Tensor]
    """How many tokens each ``<term>/<teacher>`` is the sum of."""


class BatchLoss:
    """The objective on a student's hidden states and the teachers' words.

    Every token is charged in full, once by each term: a teacher's share of a token that it cannot speak of goes to the
    text.
    """

    def __init__(
        self, objective: Objective, teachers: tuple[TeacherColumns, ...], temperature: float, student: Student
    ) -> None:
        self.objective = objective
        self.teachers = teachers if objective.teacher_terms else ()
        _check_shares(objective, self.teachers)
        require_scores(self.teachers, objective.teacher_weighting)
        self._terms = [
            {name: make_term(name, objective, teacher, temperature, student) for name in objective.teacher_terms}
            for teacher in self.teachers
        ]

    def __call__(self, student: Student, batch: Batch) -> LossSums:
        return self.of_hidden(student, student.hidden(batch), batch)

    def of_hidden(self, student: Student, hidden_ND: Tensor, batch: Batch) -> LossSums:
        """The same, where the hidden states [N, D] of the charged tokens are at hand."""
        head = StudentHead(student, hidden_ND, batch.targets)
        charges = [
            {name: term(head, batch, word) for name, term in terms.items()}
            for terms, word in zip(self._terms, batch.teachers, strict=False)
        ]
        ce_N = -head.logprobs()
        total_N = self.objective.weight("ce") * ce_N
        sums, num_spoken = {}, {}
        for columns, share_N, charged in zip(self.teachers, self._shares(batch), charges, strict=True):
            for name, (loss_N, speaks_N, divergence_N) in charged.items():
                weight_N = self.objective.weight(name) * share_N
                total_N = total_N + weight_N * torch.where(speaks_N, loss_N, ce_N)
                sums[f"{name}/{columns.name}"] = torch.where(speaks_N, divergence_N, 0.0).sum().detach()
                num_spoken[f"{name}/{columns.name}"] = speaks_N.sum()
            if self.objective.teacher_weighting != "static":
                sums[f"share/{columns.name}"] = share_N.sum()
        sums["ce"] = ce_N.sum().detach()
        return LossSums(total_N.sum(), sums, num_spoken)

    def _shares(self, batch: Batch) -> list[Tensor]:
        if not self.teachers:
            return []
        weights = [columns.weight for columns in self.teachers]
        return teacher_shares(batch.teachers, weights, self.objective.teacher_weighting, self.objective.teacher_alpha)


def _check_shares(objective: Objective, teachers: tuple[TeacherColumns, ...]) -> None:
    """Shares that vary from token to token do not fit what is charged for a span at one of its tokens.

    Raises:
        ConfigError: they would have to, for teachers that cut the text into different spans.
    """
    by_span = sorted(CHARGED_BY_SPAN.intersection(objective.teacher_terms))
    cuts = {teacher.alignment.id if teacher.alignment else None for teacher in teachers}
    if objective.teacher_weighting != "static" and by_span and len(cuts) > 1:
        raise ConfigError(
            f"--teacher-weighting {objective.teacher_weighting}: {by_span[0]} charges a span of tokens at one of them, "
            "and these teachers' spans differ; use static"
        )
