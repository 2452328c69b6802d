"""Which columns of a dataset a student learns from, and its blocks, ready for packing.

The student's tokens are one column. A teacher's sparse signal belongs to the tokens that it was made from: if those are
the student's own, row t speaks of token t; if not, the alignment says which rows speak of which student tokens, and
both vocabularies are cut into common classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from logitstore.alignment_parts import closing_ids, find_alignment, read_pairs
from logitstore.consumer.answers import answers_mask
from logitstore.consumer.rows import require_unit_temperature
from logitstore.digests import digest_json
from logitstore.errors import ConfigError, TrainingError
from logitstore.inspection import stored_tokenizer
from logitstore.manifest import Column, Manifest
from logitstore.selections import is_sampled, policy_names, selection_name
from logitstore.signals import SparseSignal, read_scalars, read_sparse
from logitstore.store import DatasetVersion, Store
from logitstore.text_parts import read_documents_of
from logitstore.token_cuts import cut_tokens
from logitstore.token_parts import TokenBlock, read_document_ends, read_tokens, tokens_template
from logitstore.tokenizer import Tokenizer
from logitstore.vocabulary_classes import VocabularyClasses, vocabulary_classes


@dataclass(frozen=True)
class TeacherColumns:
    """One teacher's columns, and its weight in the loss.

    Attributes:
        alignment: None if the teacher has the student's tokens.
        classes: common partition of the two vocabularies; None likewise.
        scalars: None if the dataset has none of this teacher.
    """

    name: str
    weight: float
    sparse: Column
    scalars: Column | None = None
    alignment: Column | None = None
    classes: VocabularyClasses | None = None


@dataclass(frozen=True)
class TeacherBlock:
    """A teacher's signal on a block of T student tokens.

    Attributes:
        signal: its rows.
        row_of: int64 [T], the row that speaks of each student token, -1 if none does.
        entropy: float32 [T], nats, of each student token's row; None without scalars or with other tokens.
        logprob: float32 [T], nats, of each student token under the teacher; None likewise.
        argmax: int64 [T], the teacher's likeliest token in each student token's place; None without scalars.
    """

    signal: SparseSignal
    row_of: np.ndarray
    entropy: np.ndarray | None
    logprob: np.ndarray | None
    argmax: np.ndarray | None


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
        columns = [tokens, *(c for t in teachers for c in (t.sparse, t.alignment) if c is not None)]
        blocks = version.manifest.plan.blocks
        answered = np.logical_and.reduce([column.cells.answered for column in columns])
        whole = np.flatnonzero(answered).tolist()
        self.teachers = tuple(_without_partial_scalars(teacher, whole) for teacher in teachers)
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
        loss_on: str = "all",
    ) -> TrainingData:
        """Find the columns for a student.

        Args:
            store: the store.
            version: of the dataset.
            student: the student's tokenizer.
            teacher_weights: by teacher name, made to sum to one; every teacher of the dataset with equal weight by
                default, none if empty.
            selection: where a teacher has several: ``topk``, or with its number, ``topk:64``; unions ``topk+sample``.
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
        teachers = tuple(
            _teacher_columns(store, manifest, student, tokens, name, weight, selection)
            for name, weight in _weights(version, teacher_weights).items()
        )
        return cls(store, version, tokens, teachers, loss_on, student)

    def check_temperature(self, temperature: float) -> None:
        """Refuse a temperature that some teacher's signal cannot serve, before anything is read.

        Raises:
            ConfigError: nothing is stored for it.
        """
        for teacher in self.teachers:
            template = teacher.sparse.template
            if is_sampled(template["selection"]):
                require_unit_temperature(temperature)
            elif temperature not in (stored := [float(number) for number in template["temperatures"]]):
                known = ", ".join(f"{number:g}" for number in stored)
                raise ConfigError(
                    f"--temperature {temperature:g}: teacher {teacher.name!r} has its mass outside the rows stored for "
                    f"{known} only; produce again with `--temperatures 1,{temperature:g}`, or train at one of these"
                )

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
        # Teachers of one tokenizer share their alignment with the student's.
        alignments = {teacher.alignment.id: teacher.alignment for teacher in self.teachers if teacher.alignment}
        pairs = {name: read_pairs(self.store.column_part(column, block)) for name, column in alignments.items()}
        teachers = tuple(self._load_teacher(teacher, block, tokens, pairs) for teacher in self.teachers)
        return TrainingBlock(tokens, charged, teachers)

    def _load_teacher(
        self,
        teacher: TeacherColumns,
        block: int,
        tokens: TokenBlock,
        pairs: Mapping[str, tuple[np.ndarray, np.ndarray]],
    ) -> TeacherBlock:
        signal = read_sparse(self.store.column_part(teacher.sparse, block))
        scored = signal.rows.scored
        row_of = np.full(tokens.num_tokens, -1, np.int64)
        if teacher.alignment is None:
            row_of[scored] = np.flatnonzero(scored)
        else:
            teacher_rows, student_rows = pairs[teacher.alignment.id]
            kept = scored[teacher_rows]
            row_of[student_rows[kept]] = teacher_rows[kept]
        entropy = logprob = argmax = None
        if teacher.scalars is not None:
            scalars, _ = read_scalars(self.store.column_part(teacher.scalars, block))
            # Rows that were not scored are NaN, which is no integer; no one asks for theirs.
            argmax = np.nan_to_num(scalars["argmax_id"], nan=-1.0).astype(np.int64)[row_of]
            if teacher.alignment is None:
                entropy, logprob = scalars["entropy"], scalars["logprob"]
        return TeacherBlock(signal, row_of, entropy, logprob, argmax)


def _without_partial_scalars(teacher: TeacherColumns, blocks: list[int]) -> TeacherColumns:
    """Scalars serve measures over all blocks, so those with holes serve none."""
    if teacher.scalars is None or bool(teacher.scalars.cells.answered[blocks].all()):
        return teacher
    return replace(teacher, scalars=None)


def _weights(version: DatasetVersion, asked: Mapping[str, float] | None) -> dict[str, float]:
    """Shares of the teachers, which sum to one: how much they count together is the objective's to say."""
    if asked is not None and not asked:
        return {}
    names = list(dict.fromkeys(column.label for column in version.manifest.find("signal", signal="sparse")))
    if not names:
        raise TrainingError(
            f"dataset {version.name!r} has no teacher's sparse signal yet; make one with `logitstore produce STORE "
            f"--dataset {version.name} --teacher MODEL`, or train on text alone with --objective ce"
        )
    weights = dict.fromkeys(names, 1.0) if asked is None else asked
    for name, weight in weights.items():
        if name not in names:
            raise ConfigError(f"--teacher-weights: no teacher {name!r} in the dataset; there are: {', '.join(names)}")
        if not 0.0 <= weight < math.inf:
            raise ConfigError(f"--teacher-weights: the weight of {name!r} is {weight:g}, expected a finite number >= 0")
    total = sum(weights.values())
    if total == 0.0:
        raise ConfigError("--teacher-weights: no teacher has a positive weight; use --objective ce to do without")
    return {name: weight / total for name, weight in weights.items() if weight > 0}


def _selection_names(column: Column) -> set[str]:
    """What ``--selection`` may call a signal: ``topk`` or ``topk:64``."""
    selection = column.template["selection"]
    return {policy_names(selection), selection_name(selection)}


def _teacher_columns(
    store: Store,
    manifest: Manifest,
    student: Tokenizer,
    tokens: Column,
    name: str,
    weight: float,
    selection: str | None,
) -> TeacherColumns:
    found = [column for column in manifest.find("signal", signal="sparse") if column.label == name]
    stored = ", ".join(selection_name(column.template["selection"]) for column in found)
    if selection is not None:
        found = [column for column in found if selection in _selection_names(column)]
    if not found:
        raise ConfigError(f"--selection {selection}: teacher {name!r} has no such signal; it has: {stored}")
    if len(found) > 1:
        raise ConfigError(f"teacher {name!r} has several sparse signals ({stored}): choose one with --selection")
    sparse = found[0]
    teacher_tokens = sparse.template["tokens"]
    # By whatever name: scalars of the very weights and windows that the entries are of.
    same = {key: sparse.template[key] for key in ("teacher", "tokens", "windows", "dtype")}
    scalars = next(manifest.find("signal", signal="scalars", **same), None)
    if teacher_tokens == tokens.id:
        return TeacherColumns(name, weight, sparse, scalars)
    alignment = find_alignment(manifest, teacher_tokens, tokens.id)
    if alignment is None:
        raise TrainingError(
            f"the student's tokens are in the dataset, but not their alignment with teacher {name!r}; make it with "
            "`logitstore align STORE --dataset NAME --student-tokenizer TOKENIZER`"
        )
    teacher_tokenizer = stored_tokenizer(store, manifest, teacher_tokens)
    return TeacherColumns(name, weight, sparse, scalars, alignment, common_classes(student, teacher_tokenizer))


def common_classes(student: Tokenizer, teacher: Tokenizer) -> VocabularyClasses:
    """The partition on which both can be compared; end and beginning of text pair by role."""
    roles = [
        pair
        for side in ("bos", "eos")
        for pair in zip(student.rendering()[side], teacher.rendering()[side], strict=False)
    ]
    return vocabulary_classes(
        cut_tokens(student.token_bytes, teacher.token_bytes, teacher.encode_texts).first,
        cut_tokens(teacher.token_bytes, student.token_bytes, student.encode_texts).first,
        roles,
    )


def _missing_tokens(version: DatasetVersion) -> str:
    known = ", ".join(column.label for column in version.manifest.find("tokens")) or "none"
    return (
        f"dataset {version.name!r} has no tokens of this student's tokenizer (it has those of: {known}); make them and "
        f"their alignment with `logitstore align STORE --dataset {version.name} --student-tokenizer TOKENIZER` (no "
        "teacher is run for it)"
    )
