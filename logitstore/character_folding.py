"""Characters folded to what no normaliser changes, so that a text and the tokens of it can be compared.

Whatever a normaliser does (NFC, NFKD, lower case, stripped accents, collapsed or removed spaces), a character and what
becomes of it fold to the same symbols, once marks, spaces and control characters, which it may drop or add, are left
out. Those are symbols too, but *ignorable* ones.
"""

from __future__ import annotations

import sys
import unicodedata
from functools import lru_cache
from threading import Lock

import numba
import numpy as np

SIGNIFICANT, SPACE, MARK, CONTROL = range(4)
"""Kinds of symbols. All but the first are ignorable."""

_UNKNOWN = -1
_METASPACE = "▁"  # how many vocabularies spell a space
_REPLACEMENT = "\ufffd"  # BERT's normaliser drops it with the control characters


class FoldTable:
    """Folded characters, looked up by compiled code; it learns those that it is asked for.

    A character folds to one symbol or several, themselves code points; white space of any kind to U+0020.

    Attributes:
        symbol: int32, by code point: its symbol; -2 - n for the n-th character that has several.
        kind: uint8, by code point: its kind as a symbol.
        several: int32, the symbols of all characters that have several.
        bounds: int32, where those of the n-th begin in ``several``.
    """

    def __init__(self) -> None:
        size = sys.maxunicode + 1
        self.symbol = np.full(size, _UNKNOWN, dtype=np.int32)
        self.kind = np.zeros(size, dtype=np.uint8)
        self.several = np.zeros(0, dtype=np.int32)
        self.bounds = np.zeros(1, dtype=np.int32)
        self._lock = Lock()

    def learn(self, points: np.ndarray) -> None:
        """Have the characters ``points``, int32 [N], in the table; negative ones are none."""
        if not _has_new(points, self.symbol):
            return
        with self._lock:
            for point in np.unique(points[points >= 0]).tolist():
                if self.symbol[point] == _UNKNOWN:
                    self._learn(point)

    def _learn(self, point: int) -> None:
        symbols = np.array([ord(symbol) for symbol in fold(chr(point))], dtype=np.int32)
        for symbol in [point, *symbols.tolist()]:
            self.kind[symbol] = kind_of(chr(symbol))
        if len(symbols) == 1:
            self.symbol[point] = symbols[0]
            return
        # Readers hold no lock: what they find by a number has to be there before the number is.
        self.several = np.concatenate([self.several, symbols])
        self.bounds = np.append(self.bounds, np.int32(len(self.several)))
        self.symbol[point] = _UNKNOWN - (len(self.bounds) - 1)


@numba.njit(nogil=True, cache=True)
def _has_new(points, symbol):  # type: ignore[no-untyped-def]
    for point in points:  # noqa: SIM110 (compiled)
        if point >= 0 and symbol[point] == _UNKNOWN:
            return True
    return False


def fold(character: str) -> str:
    """The symbols of a character: at least one."""
    if kind_of(character) == SPACE:
        return " "
    # Marks stay marks: U+0345, a mark that normalisers drop as any other, would fold to a letter.
    cases = (c if kind_of(c) == MARK else c.casefold() for c in unicodedata.normalize("NFKD", character))
    decomposed = unicodedata.normalize("NFKD", "".join(cases))
    return "".join(" " if kind_of(symbol) == SPACE else symbol for symbol in decomposed)


def significant(text: str) -> str:
    """A text folded, less all that is ignorable: what is the same of it under any normaliser."""
    return "".join(map(_significant, text))


@lru_cache(maxsize=1 << 16)
def _significant(character: str) -> str:
    return "".join(symbol for symbol in fold(character) if kind_of(symbol) == SIGNIFICANT)


def kind_of(character: str) -> int:
    """Which of the kinds a character is as a symbol."""
    category = unicodedata.category(character)
    if category[0] == "Z" or character.isspace() or character == _METASPACE:
        return SPACE
    if character == _REPLACEMENT:
        return CONTROL
    return {"M": MARK, "C": CONTROL}.get(category[0], SIGNIFICANT)


FOLDS = FoldTable()
"""One table for all tokenizers of a process."""
