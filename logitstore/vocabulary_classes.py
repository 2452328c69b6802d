"""Two vocabularies, one partition: classes of tokens on which a teacher and a student can be compared.

Where both tokenisations have a boundary, teacher and student each predict their next token, out of different sets.
Write f(s) for the first teacher token of student token s, when the bytes of s are tokenised by themselves, and g(v) for
the first student token of teacher token v. The class of student token s is f(s). The class of teacher token v is v if
some student token has it as f(s), else f(g(v)). Each is a function of the token alone, so each model's next-token
distribution is *pushed forward* to a distribution over the same classes. A KL between the two is therefore a true
divergence, between coarser distributions: >= 0, and 0 exactly when they agree on every class.

In particular there are no open and closed candidates to tell apart. A teacher token such as ``1`` that a student may
render as ``1``, ``12`` or ``123`` has all three in its class, since each tokenises to a first teacher token ``1``; and
a teacher token ``123`` that no student token begins with lies in the class of ``1``, where a student of single digits
puts it.

What it is not: a class says "the text goes on with these bytes" only as far as the tokenizers, cutting a token by
itself, cut as they do in the running text. Where they do not, mass of one event stands in two classes, and the target
is off by that mass. And differences within a class are invisible to it (which of ``12`` and ``123``); learning those is
left to the cross-entropy to the student's own realised tokens. Positions at no shared boundary are not compared at all.

Shapes: V vocabulary (of either side), C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class VocabularyClasses:
    """The common partition of a student's and a teacher's vocabulary."""

    student_class: NDArray[np.int32]
    """[V_student] class of each token, 0..C-1. Special tokens without a counterpart share one class of their own, which
    no teacher token is in: the student learns to give them nothing."""
    teacher_class: NDArray[np.int32]
    """[V_teacher] class of each token, or -1: a special token without a counterpart, whose mass joins the rest."""
    num_classes: int
    """C."""


def vocabulary_classes(
    first_teacher_token: NDArray[np.integer],
    first_student_token: NDArray[np.integer],
    role_pairs: Sequence[tuple[int, int]] = (),
) -> VocabularyClasses:
    """The common partition of two vocabularies, from the first token of each token on the other side.

    Args:
        first_teacher_token: [V_student] f(s), a teacher token or -1; see ``token_cuts``.
        first_student_token: [V_teacher] g(v), a student token or -1.
        role_pairs: (student id, teacher id) of special tokens with one role (end of text, beginning of text).

    Raises:
        ValueError: a first token or a role outside the other vocabulary.
    """
    num_student, num_teacher = len(first_teacher_token), len(first_student_token)
    _check_first("teacher", first_teacher_token, num_teacher)
    _check_first("student", first_student_token, num_student)
    student = first_teacher_token.astype(np.int64, copy=True)
    for student_id, teacher_id in role_pairs:
        if not (0 <= student_id < num_student and 0 <= teacher_id < num_teacher):
            raise ValueError(
                f"roles pair student token {student_id} with teacher token {teacher_id}, "
                f"expected ids below {num_student} and {num_teacher}"
            )
        student[student_id] = teacher_id
    # Classes are named by teacher tokens first; -1 stays -1 through the maps.
    named = np.zeros(num_teacher + 1, bool)
    named[student] = True
    named[-1] = False
    through_student = np.append(student, -1)[first_student_token]
    teacher = np.where(named[:-1], np.arange(num_teacher), through_student)
    names = np.flatnonzero(named)
    compact = np.full(num_teacher + 1, -1, np.int32)
    compact[names] = np.arange(len(names), dtype=np.int32)
    student_class = compact[student]
    alone = student_class < 0
    student_class[alone] = len(names)
    return VocabularyClasses(student_class, compact[teacher], len(names) + int(alone.any()))


def _check_first(side: str, ids: NDArray[np.integer], size: int) -> None:
    if len(ids) and not -1 <= ids.min() <= ids.max() < size:
        raise ValueError(f"first {side} tokens span {ids.min()}..{ids.max()}, expected ids in -1..{size - 1}")


def first_byte_classes(
    student_bytes: NDArray[np.integer], teacher_bytes: NDArray[np.integer], role_pairs: Sequence[tuple[int, int]] = ()
) -> VocabularyClasses:
    """The partition by a token's first byte, which any two vocabularies share: class b holds what begins with byte b.

    Roles are classes of their own after these 256, in the order of their pairs. A teacher token that begins with a byte
    that no student token begins with has no class.

    Args:
        student_bytes: [V_student] first byte of each token, -1 for tokens without bytes.
        teacher_bytes: [V_teacher] likewise.
        role_pairs: (student id, teacher id) of special tokens with one role; the first pair of a token counts.
    """
    student, teacher = student_bytes.astype(np.int32), teacher_bytes.astype(np.int32)
    begun = np.append(np.bincount(student[student >= 0], minlength=256) > 0, False)
    teacher[~begun[teacher]] = -1
    num_classes, by_student, by_teacher = 256, dict[int, int](), dict[int, int]()
    for student_id, teacher_id in role_pairs:
        role = by_student.get(student_id, by_teacher.get(teacher_id, num_classes))
        # One that has a class already, by an earlier role, keeps it, and the other joins it.
        student[student_id] = by_student.setdefault(student_id, role)
        teacher[teacher_id] = by_teacher.setdefault(teacher_id, role)
        num_classes += int(role == num_classes)
    alone = student < 0
    student[alone] = num_classes
    return VocabularyClasses(student, teacher, num_classes + int(alone.any()))
