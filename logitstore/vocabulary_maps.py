"""What two tokenizers have to do with each other: every map between their tokens that an objective asks for.

All are arrays over one vocabulary with ids of the other, or sparse rows; there is no matrix [V, V] anywhere. They
depend on the two tokenizers alone, so a store keeps them once for each pair.

Shapes: V_student, V_teacher tokens; P pairs of roles; C classes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from logitstore.array_assets import decode_arrays, encode_arrays
from logitstore.digests import digest_bytes
from logitstore.errors import DamageError, StorageError
from logitstore.first_bytes import first_bytes
from logitstore.recipes import Recipe
from logitstore.store import Store
from logitstore.token_cuts import MAX_PIECES, cut_tokens
from logitstore.token_projection import TokenProjection, project_pieces
from logitstore.token_twins import identical_bytes, role_pairs
from logitstore.tokenizer import Tokenizer
from logitstore.vocabulary_checks import check_common, check_readable
from logitstore.vocabulary_classes import VocabularyClasses, first_byte_classes, vocabulary_classes

MAPS_VERSION = "1"
_LAYOUT = "logitstore.vocabulary_maps"
_Arrays = TypeVar("_Arrays", TokenProjection, VocabularyClasses, "VocabularyMaps")


@dataclass(frozen=True)
class VocabularyMaps:
    """Maps between a student's and a teacher's vocabulary; all arrays are read-only.

    Special tokens are in each of them where both sides have one of the same role, see ``role_pairs``.
    """

    student: str
    """Fingerprint of the student's tokenizer."""
    teacher: str
    """Fingerprint of the teacher's."""
    common: NDArray[np.int32]
    """[V_student] the teacher token of the same bytes, or -1; see ``identical_bytes`` where several have them."""
    student_pieces: NDArray[np.int32]
    """[V_student, 4] teacher tokens that a student token is cut into, in their order, -1 after the last."""
    teacher_pieces: NDArray[np.int32]
    """[V_teacher, 4] student tokens that a teacher token is cut into, likewise."""
    student_first_byte: NDArray[np.int16]
    """[V_student] first byte of each token, -1 if it has none; folded where a side normalises, see ``first_bytes``."""
    teacher_first_byte: NDArray[np.int16]
    """[V_teacher] likewise."""
    role_pairs: NDArray[np.int32]
    """[P, 2] (student id, teacher id) of special tokens of one role: EOS, end of turn, BOS, padding, as far as both
    have them. A token of several roles goes by the first."""

    @property
    def first_teacher(self) -> NDArray[np.int32]:
        """[V_student] first teacher token of each student token's bytes; -1 if there is none."""
        return self.student_pieces[:, 0]

    @property
    def first_student(self) -> NDArray[np.int32]:
        """[V_teacher] first student token of each teacher token's bytes; -1 if there is none."""
        return self.teacher_pieces[:, 0]

    @cached_property
    def student_to_teacher(self) -> TokenProjection:
        """[V_student, V_teacher] weights by which a student token stands for teacher tokens."""
        return _frozen(project_pieces(self.student_pieces))

    @cached_property
    def teacher_to_student(self) -> TokenProjection:
        """[V_teacher, V_student] weights by which a teacher token stands for student tokens."""
        return _frozen(project_pieces(self.teacher_pieces))

    @cached_property
    def classes(self) -> VocabularyClasses:
        """The common partition: C classes by first tokens."""
        return _frozen(vocabulary_classes(self.first_teacher, self.first_student))

    @cached_property
    def first_byte(self) -> VocabularyClasses:
        """The partition by first bytes."""
        pairs = [(int(student), int(teacher)) for student, teacher in self.role_pairs]
        return _frozen(first_byte_classes(self.student_first_byte, self.teacher_first_byte, pairs))

    @cached_property
    def class_tokens(self) -> NDArray[np.int32]:
        """[C] the teacher token that names each of ``classes``, which all its tokens begin with; -1 for a class of
        student tokens alone."""
        names = np.full(self.classes.num_classes, -1, np.int32)
        names[self.classes.student_class] = self.first_teacher
        names.flags.writeable = False
        return names

    @cached_property
    def digest(self) -> str:
        """Of the asset: the identity of these maps."""
        return digest_bytes(self.to_asset())

    def to_asset(self) -> bytes:
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        return encode_arrays(
            arrays, {"layout": _LAYOUT, "version": MAPS_VERSION, "student": self.student, "teacher": self.teacher}
        )

    @classmethod
    def from_asset(cls, data: bytes, where: str) -> VocabularyMaps:
        """The maps that ``to_asset`` wrote.

        Raises:
            DamageError: they are not that, or of another version.
        """
        arrays, metadata = decode_arrays(data, where)
        found = (metadata.get("layout"), metadata.get("version"))
        if found != (_LAYOUT, MAPS_VERSION):
            raise DamageError(f"{where}: expected {_LAYOUT} of version {MAPS_VERSION}, found {found}")
        try:
            maps = cls(metadata["student"], metadata["teacher"], **{name: arrays[name] for name in _ARRAYS})
            maps._validate()
        except (LookupError, ValueError) as error:
            raise DamageError(f"{where}: impossible maps: {error}; run `logitstore verify`") from error
        return maps

    def _validate(self) -> None:
        num_student, num_teacher = len(self.common), len(self.teacher_first_byte)
        shapes = {
            "common": (num_student,),
            "student_pieces": (num_student, self.student_pieces.shape[-1]),
            "teacher_pieces": (num_teacher, self.teacher_pieces.shape[-1]),
            "student_first_byte": (num_student,),
            "role_pairs": (len(self.role_pairs), 2),
        }
        for name, shape in shapes.items():
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} has shape {getattr(self, name).shape}, expected {shape}")
        limits = {"common": num_teacher, "student_pieces": num_teacher, "teacher_pieces": num_student}
        for name, limit in {**limits, "student_first_byte": 256, "teacher_first_byte": 256}.items():
            values = getattr(self, name)
            if values.size and not -1 <= values.min() <= values.max() < limit:
                raise ValueError(f"{name} spans {values.min()}..{values.max()}, expected -1..{limit - 1}")
        if np.any(self.role_pairs < 0) or np.any(self.role_pairs >= (num_student, num_teacher)):
            raise ValueError("role_pairs name tokens that are not there")


_ARRAYS = tuple(field.name for field in fields(VocabularyMaps) if field.name not in {"student", "teacher"})


def vocabulary_maps(store: Store | None, student: Tokenizer, teacher: Tokenizer) -> VocabularyMaps:
    """The maps between two tokenizers: those that the store has, else made now, in seconds, and kept there.

    Args:
        store: where they are kept; None to make them anew.
        student: whose ids are trained on.
        teacher: whose ids are in the signals.

    Raises:
        VocabularyError: they have next to nothing in common, or the bytes of one are misread.
    """
    recipe = maps_recipe(student, teacher)
    if store is None:
        return build_maps(student, teacher)
    answer = store.answer(recipe)
    if answer is not None:
        try:
            return read_maps(store, answer.result["maps"])
        except DamageError:
            pass  # they are what the tokenizers say they are, so they are made anew, to the same bytes
    maps = build_maps(student, teacher)
    try:
        store.put_asset(maps.to_asset())
        store.commit_result(recipe, {"maps": maps.digest}, {})
    except StorageError:
        pass  # a store that may only be read is as good
    return maps


def read_maps(store: Store, digest: str) -> VocabularyMaps:
    """Maps by their digest, as the template of a projected signal names them.

    Raises:
        DamageError: they are missing or damaged.
    """
    return VocabularyMaps.from_asset(store.asset(digest), store.storage.child_url(f"assets/{digest}"))


def maps_recipe(student: Tokenizer, teacher: Tokenizer) -> Recipe:
    """What the maps depend on. Roles are in it: a chat template says more of them than a fingerprint."""
    return {
        "kind": "vocabulary_maps",
        "version": MAPS_VERSION,
        "student": student.fingerprint,
        "teacher": teacher.fingerprint,
        "role_pairs": [list(pair) for pair in role_pairs(student, teacher)],
    }


def build_maps(student: Tokenizer, teacher: Tokenizer) -> VocabularyMaps:
    """Make the maps; see ``vocabulary_maps``."""
    for tokenizer, name in zip((student, teacher), _names(student, teacher), strict=True):
        check_readable(tokenizer.token_bytes, len(tokenizer.special_ids), name)
    student_twins, teacher_twins = identical_bytes(student, teacher), identical_bytes(teacher, student)
    check_common(student.token_bytes, teacher.token_bytes, _names(student, teacher))
    student_pieces = _pieces(student, teacher, student_twins)
    teacher_pieces = _pieces(teacher, student, teacher_twins)
    pairs = role_pairs(student, teacher)
    for student_id, teacher_id in reversed(pairs):  # so that a token's first role is the last to be written
        student_twins[student_id] = teacher_id
        student_pieces[student_id] = _whole(teacher_id)
        teacher_pieces[teacher_id] = _whole(student_id)
    student_first_byte, teacher_first_byte = first_bytes(student.token_bytes, teacher.token_bytes)
    maps = VocabularyMaps(
        student.fingerprint,
        teacher.fingerprint,
        student_twins,
        student_pieces,
        teacher_pieces,
        student_first_byte,
        teacher_first_byte,
        np.array(pairs, np.int32).reshape(-1, 2),
    )
    return _frozen(maps)


def _pieces(tokenizer: Tokenizer, other: Tokenizer, twins: NDArray[np.int32]) -> NDArray[np.int32]:
    """int32 [V, MAX_PIECES]; a token that stays whole is its twin, though another may have the same bytes."""
    if tokenizer.fingerprint == other.fingerprint:  # tokens that it would never cut itself are the same all the same
        return np.stack([twins, *[np.full_like(twins, -1)] * (MAX_PIECES - 1)], axis=1)
    pieces = cut_tokens(tokenizer.token_bytes, other.token_bytes, other.encode_texts, other.fallback_ids).pieces
    num_bytes, num_other_bytes = (
        np.array([len(data or b"") for data in side.token_bytes]) for side in (tokenizer, other)
    )
    is_whole = (twins >= 0) & (pieces[:, 0] >= 0) & (num_other_bytes[pieces[:, 0]] == num_bytes)
    pieces[is_whole, 0] = twins[is_whole]
    return pieces


def _whole(token: int) -> list[int]:
    return [token] + [-1] * (MAX_PIECES - 1)


def _names(student: Tokenizer, teacher: Tokenizer) -> tuple[str, str]:
    return f"student's tokenizer {student.fingerprint[:12]}", f"teacher's tokenizer {teacher.fingerprint[:12]}"


def _frozen(of: _Arrays) -> _Arrays:
    """The same, its arrays made read-only."""
    for name in fields(of):
        values = getattr(of, name.name)
        if isinstance(values, np.ndarray):
            values.flags.writeable = False
    return of
