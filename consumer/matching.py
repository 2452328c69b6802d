"""Pairs of tokens, one of each vocabulary, that are taken for the same.

``gold`` pairs tokens of identical bytes; ``xtoken_hkl`` also pairs a token that the other side cuts with the piece that
stands for most of it.

Shapes: V student vocabulary (rows of its head), U teacher vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from logitstore.consumer.cell_maps import SparseProjection

RELAXED_WEIGHT = 0.6
"""Least weight in the projection with which X-Token's H-KL takes two tokens for the same."""


@dataclass(frozen=True)
class TokenMatching:
    """One-to-one pairs."""

    student_of_teacher_U: Tensor
    """[U] int64 student token of each teacher token, -1 for none; no student token stands twice."""
    unmatched_V: Tensor
    """[V] bool: student tokens in no pair, with the padding of the head."""

    def to(self, device: torch.device | str) -> TokenMatching:
        """The same on another device."""
        return TokenMatching(self.student_of_teacher_U.to(device), self.unmatched_V.to(device))


def exact_matching(common_V: Tensor, num_teacher: int, head_rows: int) -> TokenMatching:
    """Pairs of identical bytes; of several student tokens with the same bytes, the lowest id.

    Args:
        common_V: [<= head_rows] integer teacher token of the same bytes, or -1.
        num_teacher: U.
        head_rows: V.

    Raises:
        ValueError: a teacher token outside its vocabulary.
    """
    students = (common_V >= 0).nonzero()[:, 0]
    teachers = common_V[students].long()
    if len(teachers) and int(teachers.max()) >= num_teacher:
        raise ValueError(f"a student token has teacher token {int(teachers.max())}, expected ids below {num_teacher}")
    return _pairs(students, teachers, torch.ones(len(students), device=students.device), num_teacher, head_rows)


def relaxed_matching(projection: SparseProjection, least_weight: float = RELAXED_WEIGHT) -> TokenMatching:
    """Pairs of each student token and the teacher token it weighs most for in W, where it weighs enough.

    Of several student tokens with one teacher token the heaviest is taken, then the lowest id (X-Token, arXiv
    2605.21699; ``build_exact_token_map`` of NeMo-RL with ``xtoken_loss``). An identical token, of weight 1, so always
    goes before one that is only cut there.

    Args:
        projection: W, [V, U].
        least_weight: of a pair, in W.
    """
    has_cell_E = projection.cell_E < projection.num_cells
    students, teachers, weights = (
        tensor[has_cell_E] for tensor in (projection.source_E, projection.cell_E, projection.weight_E)
    )
    heaviest = _first_of_each(students, weights, teachers)
    heaviest = heaviest[weights[heaviest] >= least_weight]
    return _pairs(
        students[heaviest], teachers[heaviest], weights[heaviest], projection.num_cells, projection.num_entries
    )


def _pairs(students: Tensor, teachers: Tensor, weights: Tensor, num_teacher: int, head_rows: int) -> TokenMatching:
    taken = _first_of_each(teachers, weights, students)
    student_of_teacher_U = students.new_full((num_teacher,), -1).scatter_(0, teachers[taken], students[taken])
    unmatched_V = torch.ones(head_rows, dtype=torch.bool, device=students.device)
    unmatched_V[students[taken]] = False
    return TokenMatching(student_of_teacher_U, unmatched_V)


def _first_of_each(keys: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """For each key the position of its heaviest entry, of those of equal weight that with the lowest id."""
    order = ids.argsort(stable=True)
    order = order[weights[order].argsort(stable=True, descending=True)]
    order = order[keys[order].argsort(stable=True)]
    is_first = torch.ones_like(order, dtype=torch.bool)
    is_first[1:] = keys[order][1:] != keys[order][:-1]
    return order[is_first]
