"""Alignment parts: where two tokenisations of a block start a token at the same place, one bit per token and side.

teacher_shared  bool [Ta]
student_shared  bool [Tb]   the k-th set bit of one pairs with the k-th of the other
"""

from __future__ import annotations

from typing import Any

import numpy as np

from logitstore.alignment import Alignment, align
from logitstore.parts import Part
from logitstore.staging import ArrayToStore, StagedPart, stage
from logitstore.token_parts import TokenBlock


def alignment_template(teacher_tokens: str, student_tokens: str) -> dict[str, Any]:
    """Args: ids of the two tokens columns."""
    return {"kind": "alignment", "version": "1", "teacher_tokens": teacher_tokens, "student_tokens": student_tokens}


def align_blocks(teacher: TokenBlock, student: TokenBlock) -> Alignment:
    return align(teacher.byte_lengths, teacher.ends, teacher.exact, student.byte_lengths, student.ends, student.exact)


def stage_alignment(alignment: Alignment) -> StagedPart:
    arrays = {
        "teacher_shared": ArrayToStore(alignment.shared_a),
        "student_shared": ArrayToStore(alignment.shared_b),
    }
    return stage("alignment", arrays, {})


def read_pairs(part: Part) -> tuple[np.ndarray, np.ndarray]:
    """int64 [P] token indices of the teacher's and the student's side that start at the same place."""
    return np.flatnonzero(part.array("teacher_shared")), np.flatnonzero(part.array("student_shared"))
