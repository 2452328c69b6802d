"""A batch's loss: the terms of the objective, summed over tokens, for one global denominator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from logitstore.consumer.batches import Batch, TeacherBatch
from logitstore.consumer.data import TeacherColumns
from logitstore.consumer.objectives import Objective, teacher_loss, token_cross_entropy
from logitstore.consumer.primitive import HeadOutputs, head_outputs
from logitstore.consumer.student import Student


@dataclass(frozen=True)
class LossSums:
    """Sums over a batch's charged tokens, in nats; divide by the global number of charged tokens."""

    total: Tensor
    """What is minimised, with its gradient."""
    terms: dict[str, Tensor]
    """``ce`` and ``kl/<teacher>``, unweighted, detached."""


class DistillationLoss:
    """The objective on a student's hidden states and the teachers' rows."""

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
        total, terms = hidden_ND.new_zeros((), dtype=torch.float32), {}
        realised = None
        for number, (columns, teacher) in enumerate(zip(self.teachers, batch.teachers, strict=False)):
            shares_call = number == 0 and self.temperature == 1.0
            outputs = self._outputs(
                student, hidden_ND, teacher.rows.ids_NK, number, batch.targets if shares_call else None
            )
            realised = outputs if shares_call else realised
            kl = self._kl(teacher, outputs)
            total = total + self.objective.weight("kl") * columns.weight * kl
            terms[f"kl/{columns.name}"] = kl.detach()
        if realised is None:
            no_ids = batch.targets.new_full((batch.num_charged, 1), -1)
            realised = self._head(student, hidden_ND, no_ids, realised_T=batch.targets)
        assert realised.realised_T is not None
        ce = token_cross_entropy(realised.logsumexp_T, realised.realised_T).sum()
        if self.objective.weight("ce") > 0:
            total = total + self.objective.weight("ce") * ce
        terms["ce"] = ce.detach()
        return LossSums(total, terms)

    def _kl(self, teacher: TeacherBatch, outputs: HeadOutputs) -> Tensor:
        loss_N = teacher_loss(teacher.rows, outputs, self.temperature)
        return torch.where(teacher.has_row, loss_N, 0.0).sum()

    def _outputs(
        self, student: Student, hidden_ND: Tensor, ids_NK: Tensor, number: int, targets: Tensor | None
    ) -> HeadOutputs:
        groups, num_groups = self._groups[number]
        return self._head(
            student,
            hidden_ND,
            ids_NK,
            groups=groups,
            num_groups=num_groups,
            realised_T=targets,
            temperature=self.temperature,
        )

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


def _groups_of(teacher: TeacherColumns, student: Student) -> tuple[Tensor | None, int | None]:
    if teacher.classes is None:
        return None, None
    groups, num_groups = teacher.classes.student_groups(student.head.shape[0])
    return groups.to(student.head.device), num_groups
