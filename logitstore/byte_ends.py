"""Where the tokens of a text end in its bytes, and what proves it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Proof(IntEnum):
    """Why the byte ends of a text's tokens are believed; the numbers are stored."""

    NONE = 0
    """They are estimated; only the last is certain."""
    BYTES = 1
    """The tokens' bytes, one after the other, are the text's."""
    CHARACTERS = 2
    """Every known token's characters, normalised, are those of the stretch of text given to it, and every unknown token
    has a stretch."""


def weakest(proofs: Iterable[Proof]) -> Proof:
    """What proves the whole of which each part is proven by one of ``proofs``; bytes prove a whole without parts."""
    found = set(proofs)
    return next((proof for proof in (Proof.NONE, Proof.CHARACTERS) if proof in found), Proof.BYTES)


@dataclass(frozen=True)
class ByteEnds:
    """Where each token of a text ends.

    Attributes:
        ends: int64 [T], in bytes of the text's UTF-8; they never decrease, and the last is the text's length.
        proof: what proves them.
        failed_token: the first token whose bytes are not the text's; the number of tokens if they are, as far as they
            go, and the text goes on. None where the bytes are the proof.
        failed_byte: the byte of the text at which that token should begin.
    """

    ends: np.ndarray
    proof: Proof
    failed_token: int | None = None
    failed_byte: int | None = None
