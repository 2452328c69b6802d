"""A whole document's tokens, and the bytes that each covers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from logitstore.byte_ends import Proof
from logitstore.cutting import CutText
from logitstore.documents import Document
from logitstore.errors import TokenizerError


@dataclass(frozen=True)
class TokenizedDocument:
    """A whole document's tokens.

    Attributes:
        ids: int32 [T].
        byte_lengths: int32 [T], canonical bytes that each token newly covers: 0 for BOS, EOS and what a chat template
            writes. They sum up to the document's bytes.
        proof: what proves the lengths; without proof they are estimated, and only their sum is certain.
    """

    ids: np.ndarray
    byte_lengths: np.ndarray
    proof: Proof

    @property
    def exact(self) -> bool:
        """Whether the lengths are proven, by whatever."""
        return self.proof is not Proof.NONE


def surround(document: Document, tokens: CutText, before: Sequence[int], after: Sequence[int]) -> TokenizedDocument:
    """Surround a document's tokens, and see that their lengths sum up to its bytes."""
    ids = np.concatenate([before, tokens.ids, after]).astype(np.int32)
    lengths = np.pad(tokens.byte_lengths, (len(before), len(after)))
    missing = document.num_bytes - int(lengths.sum())
    if missing:
        # A text that is normalised away, to nothing: its bytes go to the last token, such as EOS.
        if len(ids) == 0:
            where = document.source or "a document"
            raise TokenizerError(f"{where}: the tokenizer makes no tokens of {document.text[:40]!r}: leave it out")
        lengths[-1] += missing
    return TokenizedDocument(ids, lengths, Proof.NONE if missing else tokens.proof)
