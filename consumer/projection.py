"""A teacher's rows, and a student's head, pushed forward to the classes of ``logitstore.vocabulary_classes``.

Shapes: N positions, K entries, V vocabulary (of either side), C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from logitstore.consumer.rows import TeacherRows
from logitstore.vocabulary_classes import VocabularyClasses


def student_groups(classes: VocabularyClasses, head_rows: int) -> tuple[Tensor, int]:
    """Class of each row of a student's head, int64 [head_rows], and how many there are.

    A head is often wider than its vocabulary; the padding gets a class of its own, which no teacher token is in.
    """
    padding = torch.full((head_rows - len(classes.student_class),), classes.num_classes, dtype=torch.int64)
    groups = torch.cat([torch.tensor(classes.student_class, dtype=torch.int64), padding])
    return groups, classes.num_classes + int(len(padding) > 0)


def project_rows(rows: TeacherRows, teacher_class: Tensor) -> TeacherRows:
    """Push a teacher's rows forward to classes: entries of one class become one, with the sum of their masses.

    Mass of entries without a class joins the rest; in a sample, which has none, it is left out of the sum, for no
    student token could earn it. Classes stand in ascending order, fill last.

    A sample stays unbiased, for the sum is linear in its weights. A top-k row is exact only for classes whose tokens
    are all listed: what a listed class has beyond its listed tokens cannot be told from the rest, and stays there.

    Args:
        rows: over the teacher's vocabulary.
        teacher_class: [V_teacher] integer class, or -1; on the device of the rows. Ids past its end (padding of the
            teacher's head) have no class.

    Returns:
        Rows [N, K] whose ids are classes, distinct within a row.
    """
    return merge_classes(rows, class_of(rows.ids_NK, teacher_class))


def merge_classes(rows: TeacherRows, classes_NK: Tensor) -> TeacherRows:
    """The same where each entry's class is known: int64 [N, K], -1 for none."""
    unlisted = torch.iinfo(torch.int64).max
    log_masses_NK = rows.log_masses_NK
    log_rest_N = rows.log_rest_N
    if log_rest_N is not None:
        lost_N = log_masses_NK.masked_fill(classes_NK >= 0, -torch.inf).logsumexp(-1)
        log_rest_N = torch.logaddexp(log_rest_N, lost_N)
    classes_NK, order_NK = classes_NK.masked_fill(classes_NK < 0, unlisted).sort(-1)
    log_masses_NK = log_masses_NK.gather(-1, order_NK).masked_fill(classes_NK == unlisted, -torch.inf)
    is_new_NK = torch.ones_like(classes_NK, dtype=torch.bool)
    is_new_NK[:, 1:] = classes_NK[:, 1:] != classes_NK[:, :-1]
    slots_NK = is_new_NK.cumsum(-1) - 1
    ids_NK = torch.full_like(classes_NK, unlisted).scatter_(-1, slots_NK, classes_NK)
    return TeacherRows(ids_NK.masked_fill_(ids_NK == unlisted, -1), _sum_by_slot(log_masses_NK, slots_NK), log_rest_N)


def without_unknown(rows: TeacherRows, num_known: int) -> TeacherRows:
    """Rows without entries of ids from ``num_known`` on: their mass joins the rest, or is left out of a sample."""
    unknown_NK = rows.ids_NK >= num_known
    log_rest_N = rows.log_rest_N
    if log_rest_N is not None:
        lost_N = rows.log_masses_NK.masked_fill(~unknown_NK, -torch.inf).logsumexp(-1)
        log_rest_N = torch.logaddexp(log_rest_N, lost_N)
    masses_NK = rows.log_masses_NK.masked_fill(unknown_NK, -torch.inf)
    return TeacherRows(rows.ids_NK.masked_fill(unknown_NK, -1), masses_NK, log_rest_N)


def class_of(ids: Tensor, teacher_class: Tensor) -> Tensor:
    """int64, like ``ids``: each teacher token's class; -1 for fill, padding of the head, and tokens without one."""
    known = (ids >= 0) & (ids < len(teacher_class))
    return teacher_class.long()[ids.where(known, 0)].masked_fill(~known, -1)


def _sum_by_slot(log_masses_NK: Tensor, slots_NK: Tensor) -> Tensor:
    """logsumexp over the entries of each slot of a row, -inf for empty slots; in float64, so that none underflows."""
    top_N1 = log_masses_NK.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    masses_NK = (log_masses_NK.double() - top_N1).exp_()
    sums_NK = torch.zeros_like(masses_NK).scatter_add_(-1, slots_NK, masses_NK)
    return (sums_NK.log_() + top_N1).float()
