"""How many bytes of a text each of its tokens covers: proven with the vocabulary's bytes, else estimated from offsets.

Shapes: T tokens of one text, V ids in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np


class ByteTable:
    """A vocabulary's bytes, laid out to be proven on texts."""

    def __init__(self, table: Sequence[bytes | None], special_tokens: Mapping[int, str]) -> None:
        """
        Args:
            table: bytes by id, None where a token has none.
            special_tokens: spelling by id; these stand for themselves where a text spells them (rendered chats).
        """
        self._pieces = [piece or b"" for piece in table]
        self._is_special = np.zeros(len(table), dtype=bool)
        for index, spelling in special_tokens.items():
            self._pieces[index] = spelling.encode()
            self._is_special[index] = True
        self._lengths = np.array([len(piece) for piece in self._pieces], dtype=np.int32)  # [V]

    def prove(self, ids: np.ndarray, text: bytes) -> np.ndarray | None:
        """Byte lengths int32 [T] of the tokens ``ids`` of ``text``, or None if their bytes are not the text's.

        Metaspace tokenizers put a space before a text, some also after each special token: one that the text does not
        hold is taken off the token that begins with it.
        """
        lengths = self._lengths[ids]
        if not lengths.all():  # a token without bytes
            return None
        cursor = 0
        for begin, end in self._runs(ids):
            joined = b"".join(map(self._pieces.__getitem__, ids[begin:end].tolist()))
            if not text.startswith(joined, cursor):
                if not joined.startswith(b" ") or not text.startswith(joined[1:], cursor):
                    return None
                joined = joined[1:]
                lengths[begin] -= 1
            cursor += len(joined)
        return lengths if cursor == len(text) else None

    def _runs(self, ids: np.ndarray) -> list[tuple[int, int]]:
        """Runs of ordinary tokens, and each special token by itself."""
        special = np.flatnonzero(self._is_special[ids])
        edges = np.unique(np.concatenate([[0], special, special + 1, [len(ids)]])).tolist()
        return list(pairwise(edges))


def lengths_from_offsets(character_ends: Sequence[int], text: str) -> np.ndarray:
    """Byte lengths int32 [T] from where each token ends in ``text``, as normalising tokenizers report it.

    Ends are made monotone, tokens that end at the same place share its bytes evenly, and the last token reaches the end
    of the text: what a normaliser drops is covered by the token after it.

    Args:
        character_ends: T positions in characters of ``text``.
    """
    if len(character_ends) == 0:
        return np.zeros(0, dtype=np.int32)
    bytes_before = np.concatenate([[0], np.cumsum(_utf8_lengths(text))])
    ends = np.maximum.accumulate(bytes_before[np.asarray(character_ends, dtype=np.int64)])
    ends[-1] = bytes_before[-1]
    unique, first, group, count = np.unique(ends, return_index=True, return_inverse=True, return_counts=True)
    begins = np.concatenate([[0], unique[:-1]])
    rank = np.arange(1, len(ends) + 1) - first[group]
    shared = begins[group] + (unique - begins)[group] * rank // count[group]
    return np.diff(shared, prepend=0).astype(np.int32)


def _utf8_lengths(text: str) -> np.ndarray:
    """Bytes of UTF-8 of each character, int64."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    return 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
