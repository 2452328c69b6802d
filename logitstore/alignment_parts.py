"""Alignment parts: where two tokenisations of a block start a token at the same place, one bit per token and side.

teacher_shared  bool [Ta]
student_shared  bool [Tb]   the k-th set bit of one pairs with the k-th of the other
"""

from __future__ import annotations

from typing import Any

import numpy as np

from logitstore.alignment import Alignment, align
from logitstore.manifest import Column, Manifest
from logitstore.parts import Part
from logitstore.staging import ArrayToStore, StagedPart, stage
from logitstore.token_parts import TokenBlock
from logitstore.tokenizer import Tokenizer

# Version 1 paired whatever stood directly after a message, and aligned unproven documents by their estimates.
_VERSION = "2"


def alignment_template(teacher_tokens: str, student_tokens: str) -> dict[str, Any]:
    """Args: ids of the two tokens columns."""
    return {
        "kind": "alignment",
        "version": _VERSION,
        "teacher_tokens": teacher_tokens,
        "student_tokens": student_tokens,
    }


def find_alignment(manifest: Manifest, teacher_tokens: str, student_tokens: str) -> Column | None:
    """The alignment of two tokens columns (by their ids), as the newest version that the dataset has of it."""
    found = manifest.find("alignment", teacher_tokens=teacher_tokens, student_tokens=student_tokens)
    return max(found, key=lambda column: int(column.template["version"]), default=None)


def closing_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end a text or a turn."""
    ends = (tokenizer.roles.eos, tokenizer.roles.end_of_turn)
    return frozenset(index for index in ends if index is not None)


def align_blocks(
    teacher: TokenBlock, student: TokenBlock, teacher_tokenizer: Tokenizer, student_tokenizer: Tokenizer
) -> Alignment:
    return align(teacher, student, closing_ids(teacher_tokenizer), closing_ids(student_tokenizer))


def stage_alignment(alignment: Alignment) -> StagedPart:
    arrays = {
        "teacher_shared": ArrayToStore(alignment.shared_a),
        "student_shared": ArrayToStore(alignment.shared_b),
    }
    return stage("alignment", arrays, {})


def read_pairs(part: Part) -> tuple[np.ndarray, np.ndarray]:
    """int64 [P] token indices of the teacher's and the student's side that start at the same place."""
    return np.flatnonzero(part.array("teacher_shared")), np.flatnonzero(part.array("student_shared"))
