"""Which columns of a dataset a student learns from, and its blocks, ready for packing.

The student's tokens are one column. A teacher's sparse signal belongs to the tokens that it was made from: if those are
the student's own, row t speaks of token t; if not, the alignment says which rows speak of which student tokens, and
both vocabularies are cut into common classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from logitstore.alignment_parts import alignment_template, read_pairs
from logitstore.consumer.projection import VocabularyClasses, first_tokens, vocabulary_classes
from logitstore.digests import digest_json
from logitstore.documents import TRAINABLE_ROLES
from logitstore.errors import ConfigError, TrainingError
from logitstore.inspection import stored_tokenizer
from logitstore.manifest import Column, Manifest
from logitstore.plan import HELD_OUT, TRAIN
from logitstore.signals import SparseSignal, read_scalars, read_sparse
from logitstore.store import DatasetVersion, Store
from logitstore.text_parts import read_documents_of
from logitstore.token_parts import TokenBlock, read_tokens, tokens_template
from logitstore.tokenizer import Tokenizer


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
    """

    signal: SparseSignal
    row_of: np.ndarray
    entropy: np.ndarray | None
    logprob: np.ndarray | None


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
    ) -> None:
        self.store, self.version, self.teachers, self.loss_on = store, version, teachers, loss_on
        self._tokens, self._text = tokens, next(version.manifest.find("text"))
        columns = [tokens, *(c for t in teachers for c in (t.sparse, t.alignment) if c is not None)]
        blocks = version.manifest.plan.blocks
        whole = [n for n in range(len(blocks)) if all(column.cells[n] is not None for column in columns)]
        self.num_holes = len(blocks) - len(whole)
        self.train_blocks = [n for n in whole if blocks[n].split == TRAIN]
        self.held_out_blocks = [n for n in whole if blocks[n].split == HELD_OUT]
        self.num_train_tokens = sum(cell.num_rows for n in self.train_blocks if (cell := tokens.cells[n]))
        if not self.train_blocks:
            raise TrainingError(f"dataset {version.name!r}: no block is complete; finish `logitstore produce` first")

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
            teacher_weights: by teacher name; every teacher of the dataset with equal weight by default.
            selection: ``topk`` or ``threshold``, where a teacher has both.
            loss_on: ``all`` tokens, or ``answers``: completions and assistant turns.

        Raises:
            TrainingError: the dataset does not have this student's tokens or their alignment; says what makes them.
            ConfigError: unknown teacher, or several signals to choose from.
        """
        manifest = version.manifest
        tokens = manifest.column(digest_json(tokens_template(student)))
        if tokens is None:
            raise TrainingError(_missing_tokens(version))
        teachers = tuple(
            _teacher_columns(store, manifest, student, tokens, name, weight, selection)
            for name, weight in _weights(manifest, teacher_weights).items()
        )
        return cls(store, version, tokens, teachers, loss_on)

    def load(self, block: int) -> TrainingBlock:
        """Read and decode one block of the plan."""
        tokens = read_tokens(self.store.column_part(self._tokens, block))
        charged = tokens.positions() > 0
        if self.loss_on != "all":
            documents = read_documents_of(self.store.column_part(self._text, block))
            roles = [[(segment.role, segment.content) for segment in document.segments] for document in documents]
            charged &= _answers_mask(tokens, roles)
        return TrainingBlock(tokens, charged, tuple(self._load_teacher(t, block, tokens) for t in self.teachers))

    def _load_teacher(self, teacher: TeacherColumns, block: int, tokens: TokenBlock) -> TeacherBlock:
        signal = read_sparse(self.store.column_part(teacher.sparse, block))
        scored = signal.rows.scored
        row_of = np.full(tokens.num_tokens, -1, np.int64)
        if teacher.alignment is None:
            row_of[scored] = np.flatnonzero(scored)
        else:
            teacher_rows, student_rows = read_pairs(self.store.column_part(teacher.alignment, block))
            kept = scored[teacher_rows]
            row_of[student_rows[kept]] = teacher_rows[kept]
        entropy = logprob = None
        if teacher.scalars is not None and teacher.alignment is None and teacher.scalars.cells[block] is not None:
            scalars, _ = read_scalars(self.store.column_part(teacher.scalars, block))
            entropy, logprob = scalars["entropy"], scalars["logprob"]
        return TeacherBlock(signal, row_of, entropy, logprob)


def _weights(manifest: Manifest, asked: Mapping[str, float] | None) -> dict[str, float]:
    names = list(dict.fromkeys(column.label for column in manifest.find("signal", signal="sparse")))
    if asked is None:
        return {name: 1.0 / len(names) for name in names}
    for name, weight in asked.items():
        if name not in names:
            raise ConfigError(f"--teacher-weights: no teacher {name!r} in the dataset; there are: {', '.join(names)}")
        if weight < 0:
            raise ConfigError(f"--teacher-weights: the weight of {name!r} is {weight:g}, expected >= 0")
    return {name: weight for name, weight in asked.items() if weight > 0}


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
    if selection is not None:
        found = [column for column in found if column.template["selection"]["policy"] == selection]
    if len(found) != 1:
        kept = ", ".join(":".join(column.template["selection"].values()) for column in found) or "none"
        raise ConfigError(f"teacher {name!r}: one sparse signal was expected, found {kept}; choose with --selection")
    sparse = found[0]
    teacher_tokens = sparse.template["tokens"]
    scalars = next(
        (c for c in manifest.find("signal", signal="scalars", tokens=teacher_tokens) if c.label == name), None
    )
    if teacher_tokens == tokens.id:
        return TeacherColumns(name, weight, sparse, scalars)
    alignment = manifest.column(digest_json(alignment_template(teacher_tokens, tokens.id)))
    if alignment is None:
        raise TrainingError(
            f"the student's tokens are in the dataset, but not their alignment with teacher {name!r}; make it with "
            "`logitstore produce ... --student-tokenizer TOKENIZER`"
        )
    teacher_tokenizer = stored_tokenizer(store, manifest, teacher_tokens)
    return TeacherColumns(name, weight, sparse, scalars, alignment, common_classes(student, teacher_tokenizer))


def common_classes(student: Tokenizer, teacher: Tokenizer) -> VocabularyClasses:
    """The partition on which both can be compared, see ``projection``; end and beginning of text pair by role."""
    roles = [
        pair
        for side in ("bos", "eos")
        for pair in zip(student.rendering()[side], teacher.rendering()[side], strict=False)
    ]
    return vocabulary_classes(
        first_tokens(student.token_bytes, teacher.token_bytes, teacher.encode_text),
        first_tokens(teacher.token_bytes, student.token_bytes, student.encode_text),
        roles,
    )


def _answers_mask(tokens: TokenBlock, documents: list[list[tuple[str, str]]]) -> np.ndarray:
    """bool [T]: tokens whose last byte is in an answer, and the end-of-turn token right after one."""
    mask = np.zeros(tokens.num_tokens, bool)
    for begin, end, segments in zip(tokens.begins.tolist(), tokens.ends.tolist(), documents, strict=True):
        lengths = tokens.byte_lengths[begin:end]
        segment_ends = np.cumsum([len(content.encode()) for _, content in segments])
        is_answer = np.array([role in TRAINABLE_ROLES for role, _ in segments])
        last_byte = np.cumsum(lengths) - 1
        segment = np.searchsorted(segment_ends, last_byte, side="right").clip(max=len(segments) - 1)
        closes = np.zeros(len(lengths), bool)
        closes[1:] = (lengths[1:] == 0) & (lengths[:-1] > 0)
        mask[begin:end] = is_answer[segment] & ((lengths > 0) | closes)
    return mask


def _missing_tokens(version: DatasetVersion) -> str:
    known = ", ".join(column.label for column in version.manifest.find("tokens")) or "none"
    return (
        f"dataset {version.name!r} has no tokens of this student's tokenizer (it has those of: {known}); make them and "
        f"their alignment with `logitstore produce STORE --dataset {version.name} --teacher ... --student-tokenizer "
        "TOKENIZER` (a finished teacher is not run again)"
    )
