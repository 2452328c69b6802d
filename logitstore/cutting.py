"""Cutting texts into tokens: the ``tokenizers`` library with the bytes that each token covers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import tokenizers

from logitstore.byte_ends import ByteEnds, Proof, weakest
from logitstore.byte_lengths import ByteTable, lengths_from_offsets
from logitstore.errors import TokenizerError
from logitstore.normalised_ends import FoldedTable
from logitstore.tokenizer_assets import decode_tokenizer
from logitstore.vocabulary import added_tokens, special_tokens, token_bytes, unknown_id


@dataclass(frozen=True)
class CutText:
    """The tokens of one string.

    Attributes:
        ids: int32 [T].
        byte_lengths: int32 [T], bytes of the string's UTF-8 that each token covers.
        proof: what proves the lengths.
    """

    ids: np.ndarray
    byte_lengths: np.ndarray
    proof: Proof


class Cutter:
    """A tokenizer without its template processing: strings to tokens, nothing added.

    Attributes:
        special_tokens: spelling of each special token, by id.
        token_bytes: bytes of each token by id, None for special tokens and ids without a token.
    """

    def __init__(self, asset: bytes) -> None:
        """
        Args:
            asset: canonical JSON of the tokenizer (``logitstore.tokenizer_assets``).

        Raises:
            TokenizerError: the installed tokenizers library does not accept it.
        """
        tokenizer_json = decode_tokenizer(asset)
        self.special_tokens = special_tokens(tokenizer_json)
        self.token_bytes = token_bytes(tokenizer_json)
        self._byte_table = ByteTable(self.token_bytes, added_tokens(tokenizer_json))
        self._unknown_id = unknown_id(tokenizer_json)
        self._json = json.dumps(tokenizer_json)
        # Two copies, since what a special token's spelling in a text means is a setting of the whole tokenizer.
        self._literal = _build(self._json)
        self._literal.encode_special_tokens = True

    def cut(self, texts: Sequence[str], *, parse_special: bool = False) -> list[CutText]:
        """Tokens of each text.

        Args:
            texts: what to cut, each by itself.
            parse_special: the spelling of a special token is that token (chat templates), not ordinary text.
        """
        tokenizer = self._parsing if parse_special else self._literal
        cut: list[CutText | None] = []
        for encoding, text in zip(tokenizer.encode_batch_fast(texts, add_special_tokens=False), texts, strict=True):
            ids = np.array(encoding.ids, dtype=np.int32)
            if ids.max(initial=-1) >= len(self.token_bytes):
                raise TokenizerError(
                    f"tokenizer.json: its library gives id {ids.max()}, its tokens have ids up to "
                    f"{len(self.token_bytes) - 1}: an added token's id is taken; save the tokenizer again"
                )
            lengths, proof, _ = self._prove(ids, text)
            cut.append(None if lengths is None else CutText(ids, lengths, proof))
        unproven = [text for text, tokens in zip(texts, cut, strict=True) if tokens is None]
        estimated = map(_estimate, tokenizer.encode_batch(unproven, add_special_tokens=False), unproven)
        return [next(estimated) if tokens is None else tokens for tokens in cut]

    def byte_ends(self, ids: np.ndarray, text: str) -> ByteEnds:
        """Where each of the tokens ``ids`` (integers [T]) ends in ``text``, as ``Tokenizer.byte_ends`` says."""
        wrong = ids[(ids < 0) | (ids >= len(self.token_bytes))]
        if len(wrong):
            raise TokenizerError(
                f"byte ends of {text[:40]!r}: expected token ids below {len(self.token_bytes)}, found {wrong[0]}: "
                "are they of another tokenizer?"
            )
        ids = ids.astype(np.int32)
        lengths, proof, failure = self._prove(ids, text)
        if lengths is None:
            lengths = self._estimate_lengths(ids, text)
        token, byte = (None, None) if proof is Proof.BYTES else failure
        return ByteEnds(np.cumsum(lengths, dtype=np.int64), proof, token, byte)

    def _prove(self, ids: np.ndarray, text: str) -> tuple[np.ndarray | None, Proof, tuple[int, int]]:
        """Byte lengths int32 [T] with their proof, None if there is none; and the token and byte where bytes fail."""
        lengths, *failure = self._byte_table.prove(ids, np.frombuffer(text.encode(), dtype=np.uint8))
        if failure[0] < 0:
            return lengths, Proof.BYTES, (-1, -1)
        normalised = self._folded_table.prove(ids, text)
        return normalised, Proof.NONE if normalised is None else Proof.CHARACTERS, (failure[0], failure[1])

    def _estimate_lengths(self, ids: np.ndarray, text: str) -> np.ndarray:
        for tokenizer in (self._literal, self._parsing):
            estimated = _estimate(tokenizer.encode(text, add_special_tokens=False), text)
            if np.array_equal(estimated.ids, ids):
                return estimated.byte_lengths
        return np.diff(np.linspace(0, len(text.encode()), len(ids) + 1).astype(np.int32))

    def ids_of(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of the tokens of each text; what they cover is not looked at."""
        return [encoding.ids for encoding in self._literal.encode_batch_fast(texts, add_special_tokens=False)]

    def cut_runs(self, runs: Sequence[tuple[str, bool]]) -> CutText:
        """Tokens of a string in runs (text, whether to parse special tokens), each cut by itself."""
        parts = [self.cut([run], parse_special=parse_special)[0] for run, parse_special in runs if run]
        return CutText(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.byte_lengths for part in parts]),
            weakest(part.proof for part in parts),
        )

    def spells_special(self, text: str) -> bool:
        """Whether ``text`` holds the spelling of a special token."""
        return self._special_spelling.search(text) is not None

    def specials_of(self, text: str) -> list[int]:
        """Special tokens that ``text`` spells, in order."""
        ids = self._parsing.encode(text, add_special_tokens=False).ids
        return [index for index in ids if index in self.special_tokens]

    def leading_ids(self) -> list[int]:
        """Ids that the tokenizer's own post-processor puts before a text: BOS, or none."""
        bare, dressed = (self._literal.encode("a", add_special_tokens=add).ids for add in (False, True))
        begins = (n for n in range(len(dressed)) if dressed[n : n + len(bare)] == bare)
        return dressed[: next(begins, 0)]

    def id_of(self, token: str) -> int | None:
        """Id of a token by its spelling in the vocabulary."""
        return self._literal.token_to_id(token)

    def spelling(self, index: int) -> str | None:
        """Spelling in the vocabulary of a token by its id."""
        return self._literal.id_to_token(index)

    @cached_property
    def _folded_table(self) -> FoldedTable:
        unknown = np.zeros(len(self.token_bytes), dtype=np.bool_)
        if self._unknown_id is not None:
            unknown[self._unknown_id] = True
        return FoldedTable(self._byte_table.data, self._byte_table.offsets, unknown)

    @cached_property
    def _parsing(self) -> tokenizers.Tokenizer:
        return _build(self._json)

    @cached_property
    def _special_spelling(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.special_tokens.values())) or "(?!)")  # (?!) never matches


def _build(tokenizer_json: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the only class that the library raises
        version = tokenizers.__version__
        raise TokenizerError(f"tokenizer.json is not accepted by tokenizers {version}: {error}; update it") from error


def _estimate(encoding: tokenizers.Encoding, text: str) -> CutText:
    lengths = lengths_from_offsets([end for _, end in encoding.offsets], text)
    return CutText(np.array(encoding.ids, dtype=np.int32), lengths, Proof.NONE)
