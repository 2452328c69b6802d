"""Which tokens of two vocabularies are the same: those of the same bytes, and special ones of the same role."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from logitstore.special_roles import SpecialRoles
from logitstore.tokenizer import Tokenizer


def identical_bytes(tokenizer: Tokenizer, other: Tokenizer) -> NDArray[np.int32]:
    """int32 [V]: the token of the same bytes in another vocabulary, or -1.

    Where several have the same bytes, the first of one side goes with the first of the other, the second with the
    second, and what is over with the last: byte tokens after all others, else by id.
    """
    others: dict[bytes, list[int]] = {}
    for token, data in _ranked(other):
        others.setdefault(data, []).append(token)
    twins = np.full(tokenizer.vocab_size, -1, np.int32)
    taken: dict[bytes, int] = {}
    for token, data in _ranked(tokenizer):
        same = others.get(data)
        if same is not None:
            rank = taken.get(data, 0)
            taken[data] = rank + 1
            twins[token] = same[min(rank, len(same) - 1)]
    return twins


def _ranked(tokenizer: Tokenizer) -> Iterator[tuple[int, bytes]]:
    """Tokens with their bytes, byte tokens last."""
    table, last = tokenizer.token_bytes, tokenizer.fallback_ids
    for token, data in enumerate(table):
        if data and token not in last:
            yield token, data
    for token in sorted(last):
        yield token, table[token] or b""


def role_pairs(student: Tokenizer, teacher: Tokenizer) -> list[tuple[int, int]]:
    """(student id, teacher id) of special tokens of one role, the most telling role first.

    A side without an end of turn ends turns as it ends texts. Padding that is another role's token says nothing. A
    tokenizer's special tokens go with themselves.
    """
    if student.fingerprint == teacher.fingerprint:
        return [(token, token) for token in sorted(student.special_ids)]
    sides = [_by_role(student.roles), _by_role(teacher.roles)]
    pairs = [(sides[0][role], sides[1][role]) for role in sides[0] if role in sides[1]]
    return list(dict.fromkeys(pairs))


def _by_role(roles: SpecialRoles) -> dict[str, int]:
    turn = roles.end_of_turn if roles.end_of_turn is not None else roles.eos
    found = {"eos": roles.eos, "end_of_turn": turn, "bos": roles.bos}
    if roles.pad not in found.values():
        found["pad"] = roles.pad
    return {role: token for role, token in found.items() if token is not None}
