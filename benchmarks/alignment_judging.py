"""Whether alignments are right, judged by what the tokenizers say of themselves.

A span claims a stretch of the source. Where tokens stand for bytes, those of the span, put together, must be that
stretch; where a tokenizer normalises, its own normaliser must make of the stretch what the pieces spell, but for white
space, which such tokenizers add and drop; an unknown token stands for anything that is not empty.

Shapes: T tokens, S spans, P pairs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from alignment_tokenizers import BenchTokenizer

from logitstore.alignment import Spans, align
from logitstore.documents import Document, Segment
from logitstore.token_parts import TokenBlock

_DIGITS = np.frombuffer(b"0123456789", np.uint8)


@dataclass(frozen=True)
class Judged:
    """An alignment of a corpus.

    Attributes:
        num_tokens: the student's, but for special ones.
        num_correct: those of them in spans that are right on both sides.
        num_wrong_spans: spans that are not.
        longest: tokens, of either side, of the longest span.
        num_shared: beginnings shared by tokens with bytes.
        num_same: those where the student's token is the one that the teacher's is mapped to.
        num_shared_digits: shared beginnings where a digit comes next, with or without a space.
        num_same_digits: likewise.
    """

    num_tokens: int
    num_correct: int
    num_wrong_spans: int
    longest: int
    num_shared: int
    num_same: int
    num_shared_digits: int
    num_same_digits: int

    @property
    def coverage(self) -> float:
        return self.num_correct / self.num_tokens if self.num_tokens else 1.0


def documents_of(texts: Sequence[str]) -> list[Document]:
    return [Document((Segment("text", text),)) for text in texts]


def cut(tokenizer: BenchTokenizer, texts: Sequence[str]) -> TokenBlock:
    """The tokens of a corpus, all documents in one block."""
    cut_texts = tokenizer.ours.tokenize(documents_of(texts))
    return TokenBlock(
        np.concatenate([tokens.ids for tokens in cut_texts]),
        np.concatenate([tokens.byte_lengths for tokens in cut_texts]),
        np.cumsum([len(tokens.ids) for tokens in cut_texts]),
        np.array([tokens.proof for tokens in cut_texts], np.int8),
    )


def judge(
    teacher: BenchTokenizer,
    student: BenchTokenizer,
    blocks: tuple[TokenBlock, TokenBlock],
    texts: Sequence[str],
    image: np.ndarray,
) -> Judged:
    """Align the tokens of ``texts`` and look at every span.

    Args:
        teacher: whose tokens are the first of ``blocks``.
        student: whose are the second.
        blocks: from ``cut``.
        texts: of the corpus.
        image: int [teacher's vocabulary], the student's token that each is mapped to, -1 for none.
    """
    a, b = blocks
    alignment = align(a, b)
    spans = Spans.between(a, alignment.shared_a, b, alignment.shared_b)
    of_a, of_b = _with_what_shares(teacher, a, spans.a), _with_what_shares(student, b, spans.b)
    source = "".join(texts).encode()
    right = _right(teacher, a, of_a, source) & _right(student, b, of_b, source) & _same_stretches(a, of_a, b, of_b)
    before = np.concatenate([[0], np.cumsum(_is_of_text(student, b))])
    return Judged(
        int(before[-1]),
        int(np.diff(before[of_b])[right].sum()),
        int((~right).sum()),
        spans.longest,
        *_same_images(a, b, alignment.pairs(), source, image),
    )


def _is_of_text(tokenizer: BenchTokenizer, block: TokenBlock) -> np.ndarray:
    """bool [T]: all but special tokens, and white space that the tokenizer puts where there is none."""
    spelled: Sequence[bytes | str | None] = tokenizer.spelled or tokenizer.pieces or ()
    spaces = [index for index, data in enumerate(spelled) if data is not None and not data.strip()]
    is_special = np.isin(block.ids, sorted(tokenizer.ours.special_ids))
    return ~is_special & ((block.byte_lengths > 0) | ~np.isin(block.ids, spaces))


def _with_what_shares(tokenizer: BenchTokenizer, block: TokenBlock, spans: np.ndarray) -> np.ndarray:
    """int64 [S, 2]: the spans, each with the tokens after it that cut up its last character: "ǉ" is normalised to two.

    They have no bytes of their own.
    """
    shares = (block.byte_lengths == 0) & _is_of_text(tokenizer, block)
    shares[block.begins[block.begins < len(shares)]] = False
    stops = np.flatnonzero(np.append(~shares, True))
    return np.stack([spans[:, 0], stops[np.searchsorted(stops, spans[:, 1])]], axis=1)


def _stretches(block: TokenBlock, spans: np.ndarray) -> np.ndarray:
    """int64 [S, 2], the bytes of the corpus that each span claims."""
    before = np.concatenate([[0], np.cumsum(block.byte_lengths, dtype=np.int64)])
    return before[spans]


def _same_stretches(a: TokenBlock, spans_a: np.ndarray, b: TokenBlock, spans_b: np.ndarray) -> np.ndarray:
    """bool [S]"""
    return (_stretches(a, spans_a) == _stretches(b, spans_b)).all(axis=1)


def _right(tokenizer: BenchTokenizer, block: TokenBlock, spans: np.ndarray, source: bytes) -> np.ndarray:
    """bool [S], whether the span's tokens are what it claims of the source."""
    if tokenizer.is_lossless:
        return _right_bytes(tokenizer, block, spans, source)
    ids, right = block.ids.tolist(), _judge_of(tokenizer)
    stretches = _stretches(block, spans).tolist()
    return np.array(
        [
            right(tuple(ids[first:last]), source[begin:end])
            for (first, last), (begin, end) in zip(spans.tolist(), stretches, strict=True)
        ],
        dtype=bool,
    )


def _right_bytes(tokenizer: BenchTokenizer, block: TokenBlock, spans: np.ndarray, source: bytes) -> np.ndarray:
    """bool [S]: the tokens' own bytes lie where the span claims, and are the source's.

    A space that such tokenizers put before a text is not in the source.
    """
    assert tokenizer.spelled is not None
    own = [tokenizer.spelled[index] for index in block.ids.tolist()]
    claimed = np.concatenate([[0], np.cumsum(block.byte_lengths, dtype=np.int64)])
    for begin, end in zip(block.begins.tolist(), block.ends.tolist(), strict=True):
        first = next(token for token in range(begin, end) if own[token])
        size, room = sum(map(len, own[begin:end])), int(claimed[end] - claimed[begin])
        if own[first][:1] == b" " and size == room + 1:
            own[first] = own[first][1:]
    ends = np.concatenate([[0], np.cumsum([len(data) for data in own])])
    spelled = np.frombuffer(b"".join(own)[: len(source)].ljust(len(source), b"\0"), np.uint8)
    num_different = np.concatenate([[0], np.cumsum(spelled != np.frombuffer(source, np.uint8))])
    stretches = claimed[spans]
    in_place = (ends[spans] == stretches).all(axis=1)
    return in_place & (np.diff(num_different[stretches])[:, 0] == 0)


@cache
def _judge_of(tokenizer: BenchTokenizer) -> Callable[[tuple[int, ...], bytes], bool]:
    """Of a tokenizer that normalises: (ids, stretch of the source) -> whether they are the same text."""
    pieces, normalise = tokenizer.pieces, tokenizer.normalise
    assert pieces is not None
    assert normalise is not None

    @lru_cache(1 << 20)
    def right(ids: tuple[int, ...], stretch: bytes) -> bool:
        try:
            text = _without_space(normalise(stretch.decode()))
        except UnicodeDecodeError:
            return False
        spelled = [pieces[index] for index in ids]
        if None not in spelled:
            return text == _without_space("".join(map(str, spelled)))
        pattern = "".join(".+" if piece is None else re.escape(_without_space(piece)) for piece in spelled)
        return re.fullmatch(pattern, text, re.DOTALL) is not None

    return right


def _without_space(text: str) -> str:
    return "".join(text.split())


def _same_images(
    a: TokenBlock, b: TokenBlock, pairs: tuple[np.ndarray, np.ndarray], source: bytes, image: np.ndarray
) -> tuple[int, int, int, int]:
    """Shared beginnings and those of one image; the same of those before a digit."""
    of_a, of_b = pairs
    begins_bytes = (a.byte_lengths[of_a] > 0) & (b.byte_lengths[of_b] > 0)
    of_a, of_b = of_a[begins_bytes], of_b[begins_bytes]
    same = image[a.ids[of_a]] == b.ids[of_b]
    place = (np.cumsum(a.byte_lengths, dtype=np.int64) - a.byte_lengths)[of_a]
    text = np.frombuffer(source + b"\0", np.uint8)
    is_digit = np.isin(text, _DIGITS)
    before_digit = is_digit[place] | ((text[place] == ord(" ")) & is_digit[place + 1])
    return len(same), int(same.sum()), int(before_digit.sum()), int(same[before_digit].sum())
