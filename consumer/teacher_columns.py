"""Which columns of a dataset a student's teachers speak through.

A teacher's sparse signal belongs to the tokens that it was made from: if those are the student's own, row t speaks of
token t; if not, the alignment says which rows speak of which student tokens, and maps between the two vocabularies say
what their entries mean there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from logitstore.alignment_parts import find_alignment
from logitstore.consumer.rows import require_unit_temperature
from logitstore.errors import ConfigError, TrainingError
from logitstore.inspection import stored_tokenizer
from logitstore.manifest import Column, Manifest
from logitstore.selections import is_sampled, policy_names, selection_name
from logitstore.signals import PROJECTED
from logitstore.store import DatasetVersion, Store
from logitstore.tokenizer import Tokenizer
from logitstore.vocabulary_maps import VocabularyMaps, read_maps, vocabulary_maps


@dataclass(frozen=True)
class TeacherColumns:
    """One teacher's columns, and its weight among the teachers.

    Attributes:
        alignment: None if the teacher has the student's tokens.
        tokens: the teacher's own; None likewise.
        maps: between the two vocabularies; None likewise.
        scalars: None if the dataset has none of this teacher.
    """

    name: str
    weight: float
    sparse: Column
    scalars: Column | None = None
    alignment: Column | None = None
    tokens: Column | None = None
    maps: VocabularyMaps | None = None

    @property
    def is_projected(self) -> bool:
        """Whether the rows are over the classes of ``maps``, not over the teacher's tokens."""
        return self.sparse.template.get("projection") is not None

    def known_ids(self, vocab_size: int) -> int | None:
        """How many of the ids that the rows are over mean something to a student of so many tokens; None: maps tell."""
        if self.maps is None:
            return vocab_size  # the teacher's head may be wider than the tokenizer that they share
        return self.maps.classes.num_classes if self.is_projected else None

    def without_partial_scalars(self, blocks: list[int]) -> TeacherColumns:
        """Scalars serve measures over all of ``blocks``, so those with holes serve none."""
        if self.scalars is None or bool(self.scalars.cells.answered[blocks].all()):
            return self
        return replace(self, scalars=None)

    def check_temperature(self, temperature: float) -> None:
        """Refuse a temperature that the signal cannot serve.

        Raises:
            ConfigError: nothing is stored for it.
        """
        template = self.sparse.template
        if is_sampled(template["selection"]):
            require_unit_temperature(temperature)
        elif temperature not in (stored := [float(number) for number in template["temperatures"]]):
            known = ", ".join(f"{number:g}" for number in stored)
            raise ConfigError(
                f"--temperature {temperature:g}: teacher {self.name!r} has its mass outside the rows stored for "
                f"{known} only; produce again with `--temperatures 1,{temperature:g}`, or train at one of these"
            )


def find_teachers(
    store: Store,
    version: DatasetVersion,
    student: Tokenizer,
    tokens: Column,
    weights: Mapping[str, float] | None,
    selection: str | None,
    *,
    projected: bool | None = None,
) -> tuple[TeacherColumns, ...]:
    """The columns of each teacher.

    Args:
        store: of the dataset.
        version: of the dataset.
        student: its tokenizer.
        tokens: the student's column.
        weights: by teacher name, made to sum to one; every teacher of the dataset with equal weight by default.
        selection: where a teacher has several: ``topk``, or with its number, ``topk:64``; unions ``topk+sample``.
        projected: take signals projected to the student's vocabulary (True), those over the teachers' own tokens
            (False), or the first if there are any (None).

    Raises:
        TrainingError: the dataset has no teacher, or not its alignment; says what makes them.
        ConfigError: unknown teacher, impossible weights, or several signals to choose from.
    """
    return tuple(
        _find(store, version.manifest, student, tokens, name, weight, selection, projected)
        for name, weight in _shares(version, weights).items()
    )


def _shares(version: DatasetVersion, asked: Mapping[str, float] | None) -> dict[str, float]:
    """Shares of the teachers, which sum to one: how much they count together is the objective's to say."""
    if asked is not None and not asked:
        return {}
    names = list(dict.fromkeys(column.label for column in _signals(version.manifest)))
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


def _find(
    store: Store,
    manifest: Manifest,
    student: Tokenizer,
    tokens: Column,
    name: str,
    weight: float,
    selection: str | None,
    projected: bool | None,
) -> TeacherColumns:
    sparse = _sparse_column(manifest, student, name, selection, projected)
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
    if (projection := sparse.template.get("projection")) is not None:
        maps = read_maps(store, projection["maps"])  # the very classes that its rows are over
    else:
        maps = vocabulary_maps(store, student, stored_tokenizer(store, manifest, teacher_tokens))
    return TeacherColumns(name, weight, sparse, scalars, alignment, manifest.column(teacher_tokens), maps)


def _sparse_column(
    manifest: Manifest, student: Tokenizer, name: str, selection: str | None, projected: bool | None
) -> Column:
    usable = [
        column
        for column in _signals(manifest)
        if column.label == name and _student_of(column) in (None, student.fingerprint)
    ]
    stored = ", ".join(selection_name(column.template["selection"]) for column in usable)
    found = [column for column in usable if selection is None or selection in _selection_names(column)]
    over_classes = [column for column in found if _student_of(column) is not None]
    if projected is not None or over_classes:
        found = over_classes if projected is not False else [column for column in found if column not in over_classes]
    if not found and projected is False and over_classes:
        raise ConfigError(
            f"teacher {name!r} has rows over classes only, and the objective needs them over its own tokens, or at a "
            "temperature other than 1: produce with --signals sparse, too"
        )
    if not found:
        raise ConfigError(f"--selection {selection}: teacher {name!r} has no such signal; it has: {stored}")
    if len(found) > 1:
        raise ConfigError(f"teacher {name!r} has several sparse signals ({stored}): choose one with --selection")
    return found[0]


def _signals(manifest: Manifest) -> Iterator[Column]:
    """Columns of sparse rows, over a teacher's tokens or over classes."""
    yield from manifest.find("signal", signal="sparse")
    yield from manifest.find("signal", signal=PROJECTED)


def _student_of(column: Column) -> str | None:
    """The tokenizer to whose vocabulary a signal was projected when it was made; None: to none."""
    projection = column.template.get("projection")
    return None if projection is None else projection["student"]


def _selection_names(column: Column) -> set[str]:
    """What ``--selection`` may call a signal: ``topk`` or ``topk:64``."""
    selection = column.template["selection"]
    return {policy_names(selection), selection_name(selection)}
