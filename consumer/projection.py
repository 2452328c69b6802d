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

Shapes: N positions, K entries, V vocabulary (of either side), C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from logitstore.consumer.rows import TeacherRows

TokenTable = Sequence[bytes | None]
"""Bytes of each token of a vocabulary; None for a special token or padding, which stands for no text."""


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

    def student_groups(self, head_rows: int) -> tuple[Tensor, int]:
        """Class of each row of a student's head, int64 [head_rows], and how many there are.

        A head is often wider than its vocabulary; the padding gets a class of its own, which no teacher token is in.
        """
        padding = torch.full((head_rows - len(self.student_class),), self.num_classes, dtype=torch.int64)
        groups = torch.cat([torch.from_numpy(self.student_class).long(), padding])
        return groups, self.num_classes + int(len(padding) > 0)


def first_tokens(
    token_bytes: TokenTable,
    other_bytes: TokenTable,
    encode: Callable[[str], Sequence[int]] | None = None,
) -> NDArray[np.int64]:
    """First token, in another vocabulary, of each token's bytes tokenised by themselves.

    The other tokenizer's own answer is taken where there is one: where the bytes are UTF-8 and what it returns is a
    prefix of them (a tokenizer that adds a space or normalises is not believed). Otherwise it is the longest token of
    the other vocabulary that is a prefix of the bytes.

    Args:
        token_bytes: [V] the tokens to cut.
        other_bytes: [V_other] the vocabulary to cut them with.
        encode: text to ids of the other vocabulary, without special tokens; None to use longest prefixes throughout.

    Returns:
        [V] ids in the other vocabulary; -1 for tokens without bytes, or whose first byte no token begins with.
    """
    table: dict[bytes, int] = {}
    for token, value in enumerate(other_bytes):
        if value:
            table.setdefault(value, token)
    longest = max(map(len, table), default=0)
    first = np.full(len(token_bytes), -1, np.int64)
    for token, value in enumerate(token_bytes):
        if not value:
            continue
        answer = -1 if encode is None else _first_encoded(value, other_bytes, encode)
        first[token] = answer if answer >= 0 else _longest_prefix(value, table, longest)
    return first


def _first_encoded(value: bytes, other_bytes: TokenTable, encode: Callable[[str], Sequence[int]]) -> int:
    """The tokenizer's own first token of these bytes, or -1 if it has none that is a prefix of them."""
    try:
        ids = encode(value.decode())
    except UnicodeDecodeError:
        return -1
    begin = other_bytes[ids[0]] if ids and ids[0] < len(other_bytes) else None
    return int(ids[0]) if begin and value.startswith(begin) else -1


def _longest_prefix(value: bytes, table: dict[bytes, int], longest: int) -> int:
    for length in range(min(len(value), longest), 0, -1):
        if (token := table.get(value[:length])) is not None:
            return token
    return -1


def vocabulary_classes(
    first_teacher_token: NDArray[np.int64],
    first_student_token: NDArray[np.int64],
    role_pairs: Sequence[tuple[int, int]] = (),
) -> VocabularyClasses:
    """The common partition of two vocabularies, from the first token of each token on the other side.

    Args:
        first_teacher_token: [V_student] f(s), a teacher token or -1; see ``first_tokens``.
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


def _check_first(side: str, ids: NDArray[np.int64], size: int) -> None:
    if len(ids) and not -1 <= ids.min() <= ids.max() < size:
        raise ValueError(f"first {side} tokens span {ids.min()}..{ids.max()}, expected ids in -1..{size - 1}")


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
    unlisted = torch.iinfo(torch.int64).max
    log_masses_NK = rows.log_masses_NK
    classes_NK = class_of(rows.ids_NK, teacher_class)
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
