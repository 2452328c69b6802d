"""Names of terms to terms: what a teacher is asked, given what it shares with the student."""

from __future__ import annotations

from functools import partial

import torch

from logitstore.consumer.cell_maps import SparseProjection
from logitstore.consumer.chunk_likelihood import boundary_subset
from logitstore.consumer.matching import exact_matching, relaxed_matching
from logitstore.consumer.objectives import OVER_TEACHER_TOKENS, Objective
from logitstore.consumer.span_terms import ChunkLikelihood, Gold, ProjectedStudentKl, Uld
from logitstore.consumer.student import Student
from logitstore.consumer.teacher_columns import TeacherColumns
from logitstore.consumer.terms import ClassKl, Term, TokenKl
from logitstore.errors import ConfigError
from logitstore.selections import policy_names, selection_name
from logitstore.signals import SCALAR_STEP_NATS
from logitstore.vocabulary_maps import VocabularyMaps

_BY_RANK = frozenset({"uld", "gold", "xtoken_hkl"})
_RANKED_POLICIES = frozenset({"topk", "topp"})


def make_term(name: str, objective: Objective, teacher: TeacherColumns, temperature: float, student: Student) -> Term:
    """The term of that name for one teacher.

    ``kl`` is whatever serves the teacher best: the KL on its entries where it has the student's tokens, else
    ``projected_kl``. Where it has the student's tokens, every other term on tokens is that KL, too.

    Raises:
        ConfigError: the teacher's signal cannot serve the term.
    """
    if name in _BY_RANK and (teacher.maps is not None or name == "uld"):
        _require_ranks(name, teacher)
    if teacher.is_projected and name in OVER_TEACHER_TOKENS:
        raise ConfigError(
            f"objective: {name} needs teacher {teacher.name!r}'s own tokens, and its signal is over classes that it "
            "shares with the student: open the data with projected=False"
        )
    if name == "uld":
        return Uld(temperature)
    if name == "chunk_likelihood":
        _require_chunks(teacher, objective.debias)
        head_rows, tokenizer = student.head.shape[0], student.tokenizer
        starts_1V = boundary_subset(tokenizer.token_bytes, tokenizer.special_ids, head_rows)
        return ChunkLikelihood(objective.tau, starts_1V.to(student.head.device), debias=objective.debias)
    if teacher.maps is None:
        return TokenKl(temperature)
    return _across(name, teacher, teacher.maps, temperature, student.head)


def _across(
    name: str, teacher: TeacherColumns, maps: VocabularyMaps, temperature: float, head_VD: torch.Tensor
) -> Term:
    """Of a teacher with other tokens."""
    head_rows, device = head_VD.shape[0], head_VD.device
    on_classes = partial(ClassKl, head_rows=head_rows, temperature=temperature, device=device)
    num_teacher = len(maps.teacher_pieces)
    match name:
        case "kl" | "projected_kl":
            pieces = None if teacher.is_projected else maps.teacher_pieces
            return on_classes(maps.classes, teacher_pieces=pieces, projected_nats=_projected_nats(teacher))
        case "first_byte_kl":
            return on_classes(maps.first_byte)
        case "gold":
            matching = exact_matching(torch.tensor(maps.common), num_teacher, head_rows)
            return Gold(matching.to(device), temperature)
        case "xtoken_pkl" | "xtoken_hkl":
            projection = SparseProjection.of_tokens(maps.student_to_teacher, num_teacher, head_rows)
            if name == "xtoken_pkl":
                return ProjectedStudentKl(projection.to(device), temperature)
            return Gold(relaxed_matching(projection).to(device), temperature)
    raise AssertionError(f"unknown term {name!r}")


def _require_ranks(name: str, teacher: TeacherColumns) -> None:
    selection = teacher.sparse.template["selection"]
    if not set(policy_names(selection).split("+")) <= _RANKED_POLICIES:
        raise ConfigError(
            f"objective: {name} pairs tokens by rank, which teacher {teacher.name!r} has not stored "
            f"({selection_name(selection)}): produce with --select topk:64, say, or train on kl or chunk_likelihood"
        )


def _require_chunks(teacher: TeacherColumns, debias: bool) -> None:
    if teacher.scalars is None and (debias or teacher.is_projected):
        what = "the mass of a boundary" if debias else "the log-probs of the text, which rows over classes lack"
        hint = "" if teacher.is_projected else ", or train with --no-debias"
        raise ConfigError(
            f"objective: chunk_likelihood needs {what}, and teacher {teacher.name!r} has no scalars on every block; "
            f"produce with --signals scalars,sparse{hint}"
        )


def _projected_nats(teacher: TeacherColumns) -> float | None:
    """How far a class and its only token can be apart by rounding, nats; None: the rows are over tokens."""
    if not teacher.is_projected:
        return None
    return 1.01 * (float(teacher.sparse.template["step_nats"]) + SCALAR_STEP_NATS) / 2
