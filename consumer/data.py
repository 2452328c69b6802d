"""What a student learns from a dataset: its tokens, and what each teacher said of them, block by block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from logitstore.alignment_parts import closing_ids, read_pairs
from logitstore.consumer.answers import answers_mask
from logitstore.consumer.spans import SpanLogprobs, realised_logprobs, spans_of_pairs, spans_of_tokens
from logitstore.consumer.teacher_columns import TeacherColumns, find_teachers
from logitstore.digests import digest_json
from logitstore.errors import TrainingError
from logitstore.manifest import Column
from logitstore.signals import START_CLASSES, SparseSignal, read_scalars, read_sparse
from logitstore.store import DatasetVersion, Store
from logitstore.text_parts import read_documents_of
from logitstore.token_parts import TokenBlock, read_document_ends, read_tokens, tokens_template
from logitstore.tokenizer import Tokenizer


@dataclass(frozen=True)
class TeacherScalars:
    """Of the row that speaks of each of T student tokens; what stands where there is none is undefined.

    Attributes:
        entropy: float32 [T], nats.
        argmax: int64 [T], the teacher's likeliest token.
        argmax_logprob: float32 [T], nats.
        starts: float32 [T], nats, log of the mass of all tokens that start at a boundary.
    """

    entropy: np.ndarray
    argmax: np.ndarray
    argmax_logprob: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True)
class TeacherBlock:
    """A teacher's signal on a block of T student tokens.

    Attributes:
        signal: its rows.
        row_of: int64 [T], the row that speaks of each student token, -1 if none does.
        open_row_of: int64 [T], the row of the teacher's token that might go on there, see ``SpanLogprobs``; -1: none.
        spans: what it said of the text between shared beginnings.
        scalars: None if the dataset has none.
    """

    signal: SparseSignal
    row_of: np.ndarray
    open_row_of: np.ndarray
    spans: SpanLogprobs
    scalars: TeacherScalars | None


@dataclass(frozen=True)
class TrainingBlock:
    """A block of T student tokens.

    Attributes:
        charged: bool [T], tokens that carry a loss: all but each document's first, less what the loss mask leaves out.
    """

    tokens: TokenBlock
    charged: np.ndarray
    teachers: tuple[TeacherBlock, ...]


class TrainingData:
    """The part of a dataset version that one student reads."""

    def __init__(
        self,
        store: Store,
        version: DatasetVersion,
        tokens: Column,
        teachers: tuple[TeacherColumns, ...],
        loss_on: str,
        student: Tokenizer,
    ) -> None:
        self.store, self.version, self.loss_on, self.vocab_size = store, version, loss_on, student.vocab_size
        self._closing_ids = closing_ids(student)
        self._tokens, self._text = tokens, next(version.manifest.find("text"))
        columns = [tokens, *(c for t in teachers for c in (t.sparse, t.tokens, t.alignment) if c is not None)]
        blocks = version.manifest.plan.blocks
        answered = np.logical_and.reduce([column.cells.answered for column in columns])
        whole = np.flatnonzero(answered).tolist()
        self.teachers = tuple(teacher.without_partial_scalars(whole) for teacher in teachers)
        self.num_holes = len(blocks) - len(whole)
        self.train_blocks = [n for n in whole if not blocks.held_out[n]]
        self.held_out_blocks = [n for n in whole if blocks.held_out[n]]
        if not self.train_blocks:
            raise TrainingError(
                f"dataset {version.name!r}: no training block has all that this student needs; finish "
                "`logitstore produce` first"
            )

    @classmethod
    def open(
        cls,
        store: Store,
        version: DatasetVersion,
        student: Tokenizer,
        *,
        teacher_weights: Mapping[str, float] | None = None,
        selection: str | None = None,
        projected: bool | None = None,
        loss_on: str = "all",
    ) -> TrainingData:
        """Find the columns for a student.

        Args:
            store: the store.
            version: of the dataset.
            student: the student's tokenizer.
            teacher_weights: by teacher name, see ``find_teachers``; none if empty.
            selection: where a teacher has several.
            projected: whether to take signals that were projected to the student's vocabulary, see ``find_teachers``.
            loss_on: ``all`` tokens, or ``answers``: completions and assistant turns.

        Raises:
            TrainingError: the dataset does not have this student's tokens, their alignment or any teacher; says what
                makes them.
            ConfigError: unknown teacher, impossible weights, or several signals to choose from.
        """
        manifest = version.manifest
        tokens = manifest.column(digest_json(tokens_template(student, has_chats=manifest.plan.has_chats)))
        if tokens is None:
            raise TrainingError(_missing_tokens(version))
        teachers = find_teachers(store, version, student, tokens, teacher_weights, selection, projected=projected)
        return cls(store, version, tokens, teachers, loss_on, student)

    def check_temperature(self, temperature: float) -> None:
        """Refuse a temperature that some teacher's signal cannot serve, before anything is read.

        Raises:
            ConfigError: nothing is stored for it.
        """
        for teacher in self.teachers:
            teacher.check_temperature(temperature)

    def document_ends(self, block: int) -> np.ndarray:
        """int64 [D], where each document of a block ends, in student tokens; reads nothing else of the block."""
        return read_document_ends(self.store.column_part(self._tokens, block))

    def load(self, block: int) -> TrainingBlock:
        """Read and decode one block of the plan."""
        tokens = read_tokens(self.store.column_part(self._tokens, block))
        charged = tokens.positions() > 0
        if self.loss_on != "all":
            documents = read_documents_of(self.store.column_part(self._text, block))
            charged &= answers_mask(tokens, documents, self._closing_ids)
        # Teachers of one tokenizer share its tokens, and their alignment with the student's.
        aligned = {teacher.alignment.id: teacher for teacher in self.teachers if teacher.alignment}
        alignments = {name: self._load_alignment(teacher, block) for name, teacher in aligned.items()}
        teachers = tuple(self._load_teacher(teacher, block, tokens, alignments) for teacher in self.teachers)
        return TrainingBlock(tokens, charged, teachers)

    def _load_alignment(self, teacher: TeacherColumns, block: int) -> _Aligned:
        assert teacher.alignment is not None
        assert teacher.tokens is not None
        pairs = read_pairs(self.store.column_part(teacher.alignment, block))
        return pairs, read_tokens(self.store.column_part(teacher.tokens, block))

    def _load_teacher(
        self, teacher: TeacherColumns, block: int, tokens: TokenBlock, alignments: Mapping[str, _Aligned]
    ) -> TeacherBlock:
        signal = read_sparse(self.store.column_part(teacher.sparse, block))
        columns: dict[str, np.ndarray] = {}
        if teacher.scalars is not None:
            columns, _ = read_scalars(self.store.column_part(teacher.scalars, block))
        scored, realised = signal.rows.scored, realised_logprobs(signal.rows)
        if teacher.is_projected:  # a row's first entry is then a class
            realised = columns.get("logprob", np.full_like(realised, np.nan))
        row_of = np.full(tokens.num_tokens, -1, np.int64)
        if teacher.alignment is None:
            row_of[scored] = np.flatnonzero(scored)
            spans = spans_of_tokens(realised)
        else:
            pairs, teacher_tokens = alignments[teacher.alignment.id]
            kept = scored[pairs[0]]
            row_of[pairs[1][kept]] = pairs[0][kept]
            spans = spans_of_pairs(pairs, teacher_tokens, tokens, realised)
        open_row_of = np.full_like(row_of, -1)
        is_open = spans.open_token >= 0
        open_row_of[is_open] = np.where(scored[spans.open_token[is_open]], spans.open_token[is_open], -1)
        return TeacherBlock(signal, row_of, open_row_of, spans, _scalars_of_rows(columns, row_of) if columns else None)


def _scalars_of_rows(columns: Mapping[str, np.ndarray], row_of: np.ndarray) -> TeacherScalars:
    with np.errstate(invalid="ignore"):  # NaN where not scored
        starts = np.logaddexp.reduce([columns[f"starts@{name}"] for name in START_CLASSES])
    # Rows that were not scored are NaN, which is no integer; no one asks for theirs.
    argmax = np.nan_to_num(columns["argmax_id"], nan=-1.0).astype(np.int64)
    return TeacherScalars(columns["entropy"][row_of], argmax[row_of], columns["argmax_logprob"][row_of], starts[row_of])


_Aligned = tuple[tuple[np.ndarray, np.ndarray], TokenBlock]
"""Indices of teacher's and student's tokens that begin together, and the teacher's tokens."""


def _missing_tokens(version: DatasetVersion) -> str:
    known = ", ".join(column.label for column in version.manifest.find("tokens")) or "none"
    return (
        f"dataset {version.name!r} has no tokens of this student's tokenizer (it has those of: {known}); make them and "
        f"their alignment with `logitstore align STORE --dataset {version.name} --student-tokenizer TOKENIZER` (no "
        "teacher is run for it)"
    )
