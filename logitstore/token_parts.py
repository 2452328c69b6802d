"""Token parts: the whole documents of a block, as one tokenizer cuts them.

tokens     int32 [T, 2]   id, byte_length: canonical bytes that the token newly covers (0 for BOS, EOS, template)
documents  int64 [D, 2]   token_end, exact: what proves the byte lengths on the text (``byte_ends.Proof``), 0 if nothing
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from logitstore.byte_ends import Proof
from logitstore.parts import Part
from logitstore.staging import ArrayToStore, StagedPart, stage
from logitstore.tokenized_document import TokenizedDocument
from logitstore.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenBlock:
    """The tokens of a block's documents, concatenated.

    Attributes:
        ids: int32 [T].
        byte_lengths: int32 [T].
        ends: int64 [D], where each document's tokens end.
        proof: int8 [D], what proves each document's byte lengths, see ``byte_ends.Proof``.
    """

    ids: np.ndarray
    byte_lengths: np.ndarray
    ends: np.ndarray
    proof: np.ndarray

    @property
    def exact(self) -> np.ndarray:
        """bool [D], whether a document's byte lengths are proven, by whatever."""
        return self.proof > Proof.NONE

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def begins(self) -> np.ndarray:
        """int64 [D], where each document's tokens begin."""
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])

    def positions(self) -> np.ndarray:
        """int64 [T], the position of each token within its document."""
        return np.arange(self.num_tokens) - np.repeat(self.begins, self.ends - self.begins)


def tokens_template(tokenizer: Tokenizer, *, has_chats: bool) -> dict[str, Any]:
    """The column of a tokenizer's tokens for a corpus with or without chats.

    Without, no chat template bears on the tokens: a base model and its chat-tuned teacher share them.
    """
    rendering = tokenizer.rendering()
    if not has_chats:
        rendering |= {"template": None, "variables": {}}
    return {"kind": "tokens", "version": "1", "tokenizer": tokenizer.fingerprint, "rendering": rendering}


def stage_tokens(documents: Sequence[TokenizedDocument]) -> StagedPart:
    ids = np.concatenate([document.ids for document in documents])
    lengths = np.concatenate([document.byte_lengths for document in documents])
    ends = np.cumsum([len(document.ids) for document in documents])
    proof = [document.proof for document in documents]
    arrays = {
        "tokens": ArrayToStore(np.stack([ids, lengths], axis=1).astype(np.int32), {"columns": ["id", "byte_length"]}),
        "documents": ArrayToStore(
            np.stack([ends, proof], axis=1).astype(np.int64), {"columns": ["token_end", "exact"]}
        ),
    }
    return stage("tokens", arrays, {"num_tokens": len(ids)})


def read_document_ends(part: Part) -> np.ndarray:
    """int64 [D], where each document's tokens end; the tokens themselves are not read."""
    return np.ascontiguousarray(part.array("documents")[:, 0])


def read_tokens(part: Part) -> TokenBlock:
    tokens, documents = part.array("tokens"), part.array("documents")
    return TokenBlock(
        np.ascontiguousarray(tokens[:, 0]),
        np.ascontiguousarray(tokens[:, 1]),
        np.ascontiguousarray(documents[:, 0]),
        documents[:, 1].astype(np.int8),
    )
