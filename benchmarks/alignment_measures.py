"""How fast alignments are made: the kernel, the whole way into a store, and what others take for 2,048 tokens.

All in seconds of one thread, by the processor's clock, medians of several.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from alignment_judging import cut
from alignment_rivals import StringDP, TwoPointer
from alignment_tokenizers import BenchTokenizer

from logitstore.alignment import align
from logitstore.token_parts import TokenBlock

PIECE_TOKENS = 2048
_PIECES_IN_BLOCK = 100
_SECONDS_EACH = 20.0
"""After so long, a rival is not run again."""


@dataclass(frozen=True)
class Raced:
    """What aligners took for pieces of 2,048 student tokens.

    Attributes:
        name: of the aligner.
        seconds: median over the pieces; None if it refuses these tokenizers.
        coverage: share of the student's tokens in pairs that are of the same bytes; None likewise.
    """

    name: str
    seconds: float | None
    coverage: float | None


def seconds_of(run: Callable[[], Any], repeats: int = 5) -> float:
    """Median of several."""
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        run()
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def kernel_rate(blocks: tuple[TokenBlock, TokenBlock]) -> float:
    """The student's tokens that are aligned in a second, from byte lengths to bits and counts."""
    align(*blocks)  # compiles it
    repeats = 1 + 2_000_000 // max(1, blocks[1].num_tokens)

    def many() -> None:
        for _ in range(repeats):
            align(*blocks)

    return repeats * blocks[1].num_tokens / seconds_of(many)


def pieces_of(student: BenchTokenizer, texts: Sequence[str], num_pieces: int) -> list[str]:
    """Texts of 2,048 student tokens each, as nearly as whole characters allow."""
    source = "".join(texts).encode()
    block = cut(student, ["".join(texts)])
    ends = np.cumsum(block.byte_lengths, dtype=np.int64)
    marks = ends[np.arange(0, len(ends), PIECE_TOKENS)[: num_pieces + 1]].tolist()
    return [source[begin:end].decode(errors="ignore") for begin, end in pairwise(marks)]


def race(
    teacher: BenchTokenizer,
    student: BenchTokenizer,
    pieces: Sequence[str],
    rivals: Sequence[StringDP | TwoPointer],
) -> list[Raced]:
    """Ours first, with and without the proof of the bytes, then the rivals, on the same pieces."""
    blocks = [(cut(teacher, [piece]), cut(student, [piece])) for piece in pieces]
    found = _race_ours(teacher, student, pieces, blocks)
    return found + [_race_rival(rival, teacher, student, blocks) for rival in rivals]


def _race_ours(
    teacher: BenchTokenizer,
    student: BenchTokenizer,
    pieces: Sequence[str],
    blocks: list[tuple[TokenBlock, TokenBlock]],
) -> list[Raced]:
    """Many pieces in one block, as in a store, so that they share one call."""
    many = list(pieces) * (1 + _PIECES_IN_BLOCK // len(pieces))
    joined = (cut(teacher, many), cut(student, many))
    coverage = align(*joined).statistics.coverage
    repeats = 20

    def kernel() -> None:
        for _ in range(repeats):
            align(*joined)

    def proof() -> None:
        for block, piece in zip(blocks, pieces, strict=True):
            for tokenizer, tokens in zip((teacher, student), block, strict=True):
                tokenizer.ours.byte_ends(tokens.ids[tokens.byte_lengths > 0], piece)

    alone = seconds_of(kernel) / repeats / len(many)
    proving = seconds_of(proof) / len(pieces)
    return [
        Raced("logitstore", alone, coverage),
        Raced("logitstore, with the proof of the bytes", alone + proving, coverage),
    ]


def _race_rival(
    rival: StringDP | TwoPointer,
    teacher: BenchTokenizer,
    student: BenchTokenizer,
    blocks: list[tuple[TokenBlock, TokenBlock]],
) -> Raced:
    taken: list[float] = []
    num_right = num_tokens = 0
    for a, b in blocks:
        kept = [block.byte_lengths > 0 for block in (a, b)]
        spellings = [
            [tokenizer.tokens[index] for index in block.ids[keep].tolist()]
            for tokenizer, block, keep in zip((teacher, student), (a, b), kept, strict=True)
        ]
        began = time.process_time()
        try:
            pairs = rival.align(*spellings)
        except ValueError:
            return Raced(rival.name, None, None)
        taken.append(time.process_time() - began)
        ends = [
            np.concatenate([[0], np.cumsum(block.byte_lengths[keep])]) for block, keep in zip((a, b), kept, strict=True)
        ]
        num_right += _num_right(np.array(pairs, np.int64).reshape(-1, 4), *ends)
        num_tokens += len(spellings[1])
        if sum(taken) > _SECONDS_EACH:
            break
    return Raced(rival.name, statistics.median(taken), num_right / num_tokens)


def _num_right(pairs: np.ndarray, ends_a: np.ndarray, ends_b: np.ndarray) -> int:
    """Student tokens in pairs whose two sides are the same bytes of the source."""
    begin_a, end_a, begin_b, end_b = pairs.T
    same = (ends_a[begin_a] == ends_b[begin_b]) & (ends_a[end_a] == ends_b[end_b]) & (end_b > begin_b)
    return int((end_b - begin_b)[same].sum())
