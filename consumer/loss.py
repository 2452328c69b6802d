"""A batch's loss: the terms of the objective, summed over tokens, for one global denominator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from logitstore.consumer.batches import Batch
from logitstore.consumer.data import TeacherColumns
from logitstore.consumer.divergences import teacher_loss
from logitstore.consumer.objectives import Objective, token_cross_entropy
from logitstore.consumer.primitive import HeadOutputs, head_outputs
from logitstore.consumer.projection import student_groups
from logitstore.consumer.student import Student


@dataclass(frozen=True)
class LossSums:
    """Sums over a batch's charged tokens, in nats; divide by the global number of charged tokens."""

    total: Tensor
    """What is minimised, with its gradient."""
    terms: dict[str, Tensor]
    """``ce`` and ``kl/<teacher>``, unweighted, detached."""


class _Word(NamedTuple):
    """What one teacher's rows charge, [N] each, and what the head said for it."""

    kl_N: Tensor
    within_N: Tensor
    has_row_N: Tensor
    at_one: HeadOutputs


class DistillationLoss:
    """The objective on a student's hidden states and the teachers' rows.

    A teacher of another tokenizer replaces only a part of the cross-entropy. With c the class of the realised token s,
    -log q(s) = -log q(c) - log q(s | c): its rows speak of q(c), so the text is charged with q(s | c) beside them.
    """

    def __init__(
        self, objective: Objective, teachers: tuple[TeacherColumns, ...], temperature: float, student: Student
    ) -> None:
        self.objective, self.temperature = objective, temperature
        self.teachers = teachers if objective.weight("kl") > 0 else ()
        self._groups = [_groups_of(teacher, student) for teacher in self.teachers]

    def __call__(self, student: Student, batch: Batch) -> LossSums:
        return self.of_hidden(student, student.hidden(batch), batch)

    def of_hidden(self, student: Student, hidden_ND: Tensor, batch: Batch) -> LossSums:
        """The same, where the hidden states [N, D] of the charged tokens are at hand."""
        words = [self._word(number, student, hidden_ND, batch) for number in range(len(self.teachers))]
        ce_N = self._cross_entropy(student, hidden_ND, batch, words)
        total_N, terms = self.objective.weight("ce") * ce_N, {}
        for columns, word in zip(self.teachers, words, strict=True):
            share = self.objective.weight("kl") * columns.weight
            # Every token is charged in full: where a teacher says nothing of it, its share goes to the text.
            total_N = total_N + share * torch.where(word.has_row_N, word.kl_N + word.within_N, ce_N)
            terms[f"kl/{columns.name}"] = torch.where(word.has_row_N, word.kl_N, 0.0).sum().detach()
        terms["ce"] = ce_N.sum().detach()
        return LossSums(total_N.sum(), terms)

    def _word(self, number: int, student: Student, hidden_ND: Tensor, batch: Batch) -> _Word:
        """What a teacher's rows charge."""
        rows, has_row_N = batch.teachers[number].rows, batch.teachers[number].has_row
        groups, num_groups = self._groups[number]
        head = partial(
            self._head,
            student,
            hidden_ND,
            rows.ids_NK,
            groups=groups,
            num_groups=num_groups,
            realised_T=batch.targets,
        )
        outputs = head(temperature=self.temperature)
        at_one = outputs if self.temperature == 1.0 else head(temperature=1.0)
        kl_N = teacher_loss(rows, outputs, self.temperature)
        if groups is None:
            return _Word(kl_N, torch.zeros_like(kl_N), has_row_N, at_one)
        is_realised_NK = rows.ids_NK == groups[batch.targets][:, None]
        class_N = torch.where(is_realised_NK, at_one.gathered_TK, 0.0).sum(-1)
        return _Word(kl_N, class_N - _realised(at_one), has_row_N, at_one)

    def _cross_entropy(self, student: Student, hidden_ND: Tensor, batch: Batch, words: list[_Word]) -> Tensor:
        if words:
            return token_cross_entropy(words[0].at_one.logsumexp_T, _realised(words[0].at_one))
        no_ids = batch.targets.new_full((batch.num_charged, 1), -1)
        outputs = self._head(student, hidden_ND, no_ids, realised_T=batch.targets)
        return token_cross_entropy(outputs.logsumexp_T, _realised(outputs))

    def _head(self, student: Student, hidden_ND: Tensor, ids_NK: Tensor, **options: object) -> HeadOutputs:
        return head_outputs(
            hidden_ND,
            student.head,
            ids_NK,
            bias=student.head_bias,
            softcap=student.transform.softcap,
            scale=student.transform.scale,
            **options,  # type: ignore[arg-type]
        )


def _realised(outputs: HeadOutputs) -> Tensor:
    assert outputs.realised_T is not None, "asked for with realised_T"
    return outputs.realised_T


def _groups_of(teacher: TeacherColumns, student: Student) -> tuple[Tensor | None, int | None]:
    if teacher.classes is None:
        return None, None
    groups, num_groups = student_groups(teacher.classes, student.head.shape[0])
    return groups.to(student.head.device), num_groups
