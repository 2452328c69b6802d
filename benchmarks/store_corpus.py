"""Documents and tokenizers of the store's benchmark: real text, and two vocabularies that people train with.

Half documentation (that of the demo), half source code of the standard library, cut at its blank lines. Documents are
in the order of their digests, so that every stretch of them is a fair sample, and one in twelve is held out.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from demo_corpus import documents

_CHARACTERS_EACH = 1_000_000
_PIECE, _SHORTEST, _LONGEST = 700, 100, 1200
_HELD_OUT_EACH = 12
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_VOCABULARIES = {"32k": "tokenizer.model.v1", "131k": "tekken_240911.json"}
VOCABULARIES = tuple(_VOCABULARIES)


@dataclass(frozen=True)
class Corpus:
    """Tokenised documents, each an int32 array that begins with BOS."""

    training: list[np.ndarray]
    held_out: list[np.ndarray]


@cache
def load_corpus(vocabulary: str) -> Corpus:
    """The documents, cut by the tokenizer of ``vocabulary``, one of ``VOCABULARIES``."""
    encode, _ = load_tokenizer(vocabulary)
    chosen = sorted({*_take(row["text"] for row in _shuffled_docs()), *_take(_source_pieces())}, key=_digest)
    cut = [np.array(encode(text), np.int32) for text in chosen]
    held_out = [int.from_bytes(_digest(text)[-4:]) % _HELD_OUT_EACH == 0 for text in chosen]
    return Corpus(
        [ids for ids, held in zip(cut, held_out, strict=True) if not held],
        [ids for ids, held in zip(cut, held_out, strict=True) if held],
    )


def corpus_bytes(vocabulary: str) -> tuple[int, int]:
    """Tokens of all documents, and the bytes of UTF-8 that they stand for."""
    spelled, _ = token_bytes(vocabulary)
    lengths = np.array([len(data or b"") for data in spelled])
    corpus = load_corpus(vocabulary)
    ids = np.concatenate(corpus.training + corpus.held_out)
    return len(ids), int(lengths[ids].sum())


def load_tokenizer(vocabulary: str) -> tuple[Callable[[str], list[int]], int]:
    """A function from text to ids (BOS first), and the size of the vocabulary."""
    tokenizer = _tokenizer(vocabulary)
    return lambda text: tokenizer.encode(text, bos=True, eos=False), tokenizer.n_words


def token_bytes(vocabulary: str) -> tuple[list[bytes | None], frozenset[int]]:
    """What each token stands for, None for special ones, and the ids of these."""
    tokenizer = _tokenizer(vocabulary)
    special = frozenset(token for token in range(tokenizer.n_words) if tokenizer.is_special(token))
    if hasattr(tokenizer, "id_to_byte_piece"):
        spell = tokenizer.id_to_byte_piece
    else:

        def spell(token: int) -> bytes:
            piece = tokenizer.id_to_piece(token)
            found = _BYTE_TOKEN.fullmatch(piece)
            return bytes.fromhex(found[1]) if found else piece.replace("▁", " ").encode()

    return [None if token in special else spell(token) for token in range(tokenizer.n_words)], special


@cache
def _tokenizer(vocabulary: str) -> Any:
    from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    path = str(importlib.resources.files("mistral_common") / "data" / _VOCABULARIES[vocabulary])
    return Tekkenizer.from_file(path) if path.endswith(".json") else SentencePieceTokenizer(path)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _shuffled_docs() -> list[dict[str, str]]:
    return sorted(documents(), key=lambda row: _digest(row["text"]))


def _take(texts: Iterator[str]) -> Iterator[str]:
    size = 0
    for text in texts:
        if size >= _CHARACTERS_EACH:
            return
        size += len(text)
        yield text


def _source_pieces() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.glob("*.py"), key=lambda path: _digest(path.name)):
        held = ""
        for paragraph in re.split(r"\n\s*\n(?=\S|    \S)", path.read_text(encoding="utf-8", errors="replace")):
            if held and len(held) + len(paragraph) > _PIECE:
                if _SHORTEST <= len(held) <= _LONGEST:
                    yield held
                held = ""
            held = f"{held}\n\n{paragraph}" if held else paragraph
        if _SHORTEST <= len(held) <= _LONGEST:
            yield held
