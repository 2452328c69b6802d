"""How others align two tokenisations of a text, re-implemented from reading: the shape of the work, none of the code.

Both take the tokens as their tokenizers spell them and return pairs of token ranges. Both are plain Python, as theirs
are. NeMo-RL keeps the scores of its dynamic programme in a NumPy array, whose single elements are slow to read; it is
measured so, and with lists as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Ranges = list[tuple[int, int, int, int]]
"""Of each pair: begin and end among the teacher's tokens, begin and end among the student's."""
_MATCH, _GAP, _PER_JOINED, _MOST_JOINED, _ANCHOR = 3.0, -1.5, 1.5, 4, 3
_PAIR, _TEACHER_GAP, _STUDENT_GAP, _JOIN_TEACHER, _JOIN_STUDENT = 0, 1, 2, 10, 20


@dataclass(frozen=True)
class StringDP:
    """In the style of NeMo-RL's x_token aligner, as it was until 2026.

    Spellings are canonicalised; runs of three tokens that occur once on both sides are anchors; between them
    Needleman-Wunsch scores equal tokens +3, others -3, gaps -1.5, and one token against two to four joined ones +1.5
    each. Pairs that do not match are left out, as its losses leave them out.

    Attributes:
        canonicalise: makes spellings comparable: (tokens) -> (strings, the range of tokens that each is of).
        zeros: makes the table of scores, of so many rows and columns: ``list_table`` or ``array_table``.
    """

    name: str
    canonicalise: Callable[[Sequence[str]], tuple[list[str], list[tuple[int, int]]]]
    zeros: Callable[[int, int], Any]

    def align(self, teacher: Sequence[str], student: Sequence[str]) -> Ranges:
        """Pairs of ranges of the tokens ``teacher`` and ``student``, in order."""
        left, left_of = self.canonicalise(teacher)
        right, right_of = self.canonicalise(student)
        pairs: Ranges = []
        begin_left = begin_right = 0
        for i, j in [*_anchors(left, right), (len(left), len(right))]:
            between = _needleman_wunsch(left[begin_left:i], right[begin_right:j], self.zeros)
            pairs += [(a + begin_left, b + begin_left, c + begin_right, d + begin_right) for a, b, c, d in between]
            if i < len(left):
                pairs += [(i + k, i + k + 1, j + k, j + k + 1) for k in range(_ANCHOR)]
            begin_left, begin_right = i + _ANCHOR, j + _ANCHOR
        pairs = [pair for pair in pairs if "".join(left[pair[0] : pair[1]]) == "".join(right[pair[2] : pair[3]])]
        return [(left_of[a][0], left_of[b - 1][1], right_of[c][0], right_of[d - 1][1]) for a, b, c, d in pairs]


@dataclass(frozen=True)
class TwoPointer:
    """In the style of TRL's GOLD: byte offsets of both, a walk that cuts where they agree. ByteLevel only."""

    name: str
    byte_of: dict[str, int]
    """Byte by the character that ByteLevel spells it with."""

    def align(self, teacher: Sequence[str], student: Sequence[str]) -> Ranges:
        """Likewise.

        Raises:
            ValueError: a token is not spelled in ByteLevel's characters.
        """
        left, right = self._ends(teacher), self._ends(student)
        pairs: Ranges = []
        begin_left = begin_right = i = j = 0
        while i < len(left) and j < len(right):
            if left[i] < right[j]:
                i += 1
            elif left[i] > right[j]:
                j += 1
            else:
                i, j = i + 1, j + 1
                pairs.append((begin_left, i, begin_right, j))
                begin_left, begin_right = i, j
        return pairs

    def _ends(self, tokens: Sequence[str]) -> list[int]:
        ends, end = [], 0
        for token in tokens:
            if not all(character in self.byte_of for character in token):
                raise ValueError(f"{token!r} is not a ByteLevel token")
            end += len(token)
            ends.append(end)
        return ends


def canonical_spellings(tokens: Sequence[str]) -> tuple[list[str], list[tuple[int, int]]]:
    """One sign for a space before a word and one for a line end; byte-fallback tokens that make up a character joined.

    ByteLevel's spelling of other characters stays as it is, as in the original, which mends some forty of them by name.
    """
    strings = [_canonical(token) for token in tokens]
    return _join_bytes(strings, [_fallback_byte(token) for token in tokens])


def decoded_spellings(byte_of: dict[str, int]) -> Callable[[Sequence[str]], tuple[list[str], list[tuple[int, int]]]]:
    """The same for a version that also reads ByteLevel's spelling wherever a token is whole characters."""

    def decode(tokens: Sequence[str]) -> tuple[list[str], list[tuple[int, int]]]:
        return canonical_spellings([_decoded(token, byte_of) for token in tokens])

    return decode


def _canonical(token: str) -> str:
    if token[:1] in (" ", "_", "▁"):
        token = "Ġ" + token[1:]
    return token.replace("Ċ", "\n").replace("ĉ", "\t")


def _decoded(token: str, byte_of: dict[str, int]) -> str:
    if not all(character in byte_of for character in token) or token.isascii():
        return token
    try:
        return bytes(byte_of[character] for character in token).decode().replace(" ", "▁")
    except UnicodeDecodeError:
        return token


def _fallback_byte(token: str) -> int | None:
    return int(token[3:5], 16) if len(token) == 6 and token.startswith("<0x") and token.endswith(">") else None


def _join_bytes(strings: list[str], byte_tokens: list[int | None]) -> tuple[list[str], list[tuple[int, int]]]:
    joined: list[str] = []
    ranges: list[tuple[int, int]] = []
    begin = 0
    while begin < len(strings):
        end, text = begin + 1, strings[begin]
        if byte_tokens[begin] is not None:
            text = chr(byte_tokens[begin] or 0)
            for stop in range(begin + 2, min(begin + 4, len(strings)) + 1):
                run = byte_tokens[begin:stop]
                if None in run:
                    break
                try:
                    end, text = stop, bytes(run).decode()  # type: ignore[arg-type]
                    break
                except UnicodeDecodeError:
                    continue
        joined.append(text)
        ranges.append((begin, end))
        begin = end
    return joined, ranges


def _anchors(left: list[str], right: list[str]) -> list[tuple[int, int]]:
    """Where runs of three tokens begin that occur once on both sides, disjoint and in order."""
    found = []
    once_left, once_right = _single_runs(left), _single_runs(right)
    for run, i in once_left.items():
        j = once_right.get(run, -1)
        if i >= 0 and j >= 0:
            found.append((i, j))
    chosen: list[tuple[int, int]] = []
    end_left = end_right = 0
    for i, j in sorted(found):
        if i >= end_left and j >= end_right:
            chosen.append((i, j))
            end_left, end_right = i + _ANCHOR, j + _ANCHOR
    return chosen


def _single_runs(strings: list[str]) -> dict[tuple[str, ...], int]:
    """Position of each run, -1 if it occurs more than once."""
    places: dict[tuple[str, ...], int] = {}
    for begin in range(len(strings) - _ANCHOR + 1):
        run = tuple(strings[begin : begin + _ANCHOR])
        places[run] = -1 if run in places else begin
    return places


def list_table(num_rows: int, num_columns: int) -> list[list[float]]:
    return [[0.0] * num_columns for _ in range(num_rows)]


def array_table(num_rows: int, num_columns: int) -> np.ndarray:
    return np.zeros((num_rows, num_columns), np.float32)


def _needleman_wunsch(left: list[str], right: list[str], zeros: Callable[[int, int], Any]) -> Ranges:
    """Best pairing of two lists of strings, in which one may stand for two to four joined ones of the other."""
    joins_left, joins_right = _joins(left), _joins(right)
    scores = zeros(len(left) + 1, len(right) + 1)
    moves = [bytearray(len(right) + 1) for _ in range(len(left) + 1)]
    for i in range(1, len(left) + 1):
        scores[i][0], moves[i][0] = _GAP * i, _TEACHER_GAP
    for j in range(1, len(right) + 1):
        scores[0][j], moves[0][j] = _GAP * j, _STUDENT_GAP
    for i in range(1, len(left) + 1):
        one, before, row, move = left[i - 1], scores[i - 1], scores[i], moves[i]
        for j in range(1, len(right) + 1):
            other = right[j - 1]
            best, step = before[j - 1] + (_MATCH if one == other else -_MATCH), _PAIR
            if before[j] + _GAP > best:
                best, step = before[j] + _GAP, _TEACHER_GAP
            if row[j - 1] + _GAP > best:
                best, step = row[j - 1] + _GAP, _STUDENT_GAP
            for count in range(2, min(j, _MOST_JOINED) + 1):
                if one == joins_right[count][j]:
                    score = before[j - count] + _PER_JOINED * count
                    if score > best:
                        best, step = score, _JOIN_STUDENT + count
            for count in range(2, min(i, _MOST_JOINED) + 1):
                if other == joins_left[count][i]:
                    score = scores[i - count][j - 1] + _PER_JOINED * count
                    if score > best:
                        best, step = score, _JOIN_TEACHER + count
            row[j], move[j] = best, step
    return _trace(moves)


def _joins(strings: list[str]) -> list[list[str]]:
    """By count and end: that many strings before the end, joined."""
    return [
        ["".join(strings[end - count : end]) if end >= count else "" for end in range(len(strings) + 1)]
        for count in range(_MOST_JOINED + 1)
    ]


def _trace(moves: list[bytearray]) -> Ranges:
    pairs: Ranges = []
    i, j = len(moves) - 1, len(moves[0]) - 1
    while i or j:
        back_left, back_right = _advance(moves[i][j])
        pairs.append((i - back_left, i, j - back_right, j))
        i, j = i - back_left, j - back_right
    return pairs[::-1]


def _advance(step: int) -> tuple[int, int]:
    """Strings of either side that a move takes."""
    if step > _JOIN_STUDENT:
        return 1, step - _JOIN_STUDENT
    if step > _JOIN_TEACHER:
        return step - _JOIN_TEACHER, 1
    return int(step != _STUDENT_GAP), int(step != _TEACHER_GAP)
