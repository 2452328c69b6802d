"""Which tokens start at a boundary: with white space or punctuation, or by ending a text or a turn.

One rule for teachers, whose mass on them is stored with the scalars, and students, whose mass is compared with it.

Shapes: V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from logitstore.signals import START_CLASSES

_LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_WORD_BYTES = frozenset(_LETTERS + b"0123456789_")
_SPACE_BYTES = frozenset(b" \t\n\r\v\f")


def start_masks(token_bytes: Sequence[bytes | None], special_ids: frozenset[int], vocabulary_size: int) -> np.ndarray:
    """float32 [V, C]: 1 where a token starts at a boundary of the class, in the order of ``START_CLASSES``.

    Args:
        token_bytes: of a tokenizer, None for tokens without bytes.
        special_ids: of its special tokens, which end a text or a turn.
        vocabulary_size: V, of the model's head, which may be wider.
    """
    masks = np.zeros((vocabulary_size, len(START_CLASSES)), np.float32)
    for token, data in enumerate(token_bytes):
        name = _start_class(data, token in special_ids)
        if name is not None:
            masks[token, START_CLASSES.index(name)] = 1.0
    return masks


def _start_class(data: bytes | None, is_special: bool) -> str | None:
    if not data:
        return "end" if is_special else None
    if data[0] in _SPACE_BYTES:
        return "space"
    return "punctuation" if data[0] < 128 and data[0] not in _WORD_BYTES else None
