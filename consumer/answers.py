"""Which tokens are an answer: completions and assistant turns, each with what ends it.

Derived when it is read, from segments and byte lengths, so templates need no ``{% generation %}`` marks, and another
mask asks nothing of a teacher.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from logitstore.documents import TRAINABLE_ROLES, Document
from logitstore.token_parts import TokenBlock


def answers_mask(tokens: TokenBlock, documents: Sequence[Document], closing_ids: Collection[int]) -> np.ndarray:
    """bool [T]: tokens whose last byte is in an answer, and what follows it up to its end of turn.

    An end of turn may stand behind text of the template (Llama-2's space before ``</s>``), which is then of the answer,
    too. Where there is none before the next content, one token is what a template ends an answer by: a newline, say.

    Args:
        tokens: of a block.
        documents: of the same block.
        closing_ids: tokens that end a turn or a text.
    """
    mask = np.zeros(tokens.num_tokens, bool)
    closes = np.isin(tokens.ids, list(closing_ids)) & (tokens.byte_lengths == 0)
    for begin, end, document in zip(tokens.begins.tolist(), tokens.ends.tolist(), documents, strict=True):
        lengths = tokens.byte_lengths[begin:end]
        segment_ends = np.cumsum([len(segment.content.encode()) for segment in document.segments])
        is_answer = np.array([segment.role in TRAINABLE_ROLES for segment in document.segments])
        last_byte = np.cumsum(lengths) - 1
        segment = np.searchsorted(segment_ends, last_byte, side="right").clip(max=len(is_answer) - 1)
        mask[begin:end] = is_answer[segment] & ((lengths > 0) | _ends_of_turns(lengths, closes[begin:end]))
    return mask


def _ends_of_turns(lengths: np.ndarray, closes: np.ndarray) -> np.ndarray:
    """bool [T]: of each run of tokens without bytes that follows one with bytes, up to its first closer, or one."""
    ends = np.zeros(len(lengths), bool)
    contents = np.flatnonzero(lengths > 0)
    for last, following in zip(contents.tolist(), [*contents[1:].tolist(), len(lengths)], strict=True):
        if following > last + 1:
            closers = np.flatnonzero(closes[last + 1 : following])
            ends[last + 1 : last + 2 + (int(closers[0]) if len(closers) else 0)] = True
    return ends
