"""What is likely to stand in a row: all token ids by frequency, and a list of candidates per previous realised token.

A token id is stored as its place in a list, or, if the list lacks it, as its place among all ids. Places are grouped
as the symbols of ``rans`` group numbers, and ids of one group ascend: only the groups are learnt and stored.

A candidate is listed if what it saves is more than what it costs to list. Lists fall into ``NUM_CLASSES`` classes of
like steepness, each with frequency tables of its own.

Shapes: U ids in use, L lists, I items of all lists.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from logitstore.codecs.numbers import NumberReader, encode_numbers
from logitstore.codecs.rans import ALPHABET, smallest_of
from logitstore.errors import DamageError

NUM_CLASSES = 16
_HEADER = struct.Struct("<3I")
_LISTING_BITS = 12.0
"""What an item has to save to be listed: more than it costs, for tables are better over lists of what is likely."""
_MAX_LIST = 1 << 14
_MAX_ID = (1 << 31) - 1
_SPARE_ENTRIES = 1 << 24
"""More entries than this are not needed to learn lists; every n-th will do."""
_LARGE_ID = 1 << 22

_SYMBOLS = np.array([smallest_of(symbol) for symbol in range(ALPHABET)], np.int64)
_ORDER_GROUPS = np.array([0, *(1 << octave for octave in range(33))], np.int64)
_LIST_GROUPS = np.array([0, *(4**power for power in range(1, 18))], np.int64)
"""Where groups of places begin. The wider they are, the less is said of what is more frequent, and paid for it."""


@dataclass(frozen=True)
class Candidates:
    """What rows are likely to hold.

    Attributes:
        order: int32 [U], ids by place.
        list_of: int32 [U], by the place of the previous token: the number of its list; -1: none.
        begins: int64 [L + 1], where each list begins in ``items``.
        items: int32 [I], places.
        classes: int32 [L].
    """

    order: np.ndarray
    list_of: np.ndarray
    begins: np.ndarray
    items: np.ndarray
    classes: np.ndarray


def place_ids(ids_E: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The order int32 [U] of the ids in use, by frequency, and the place int32 [E] of each entry's id in it."""
    if ids_E.max(initial=0) < _LARGE_ID:
        counts_V = np.bincount(ids_E, minlength=1)
        used = np.flatnonzero(counts_V)
        order = _group_sorted(used[np.argsort(-counts_V[used], kind="stable")])
        place_V = np.zeros(len(counts_V), np.int32)
        place_V[order] = np.arange(len(order))
        return order, place_V[ids_E]
    used, inverse_E, counts = np.unique(ids_E, return_inverse=True, return_counts=True)
    order = _group_sorted(used[np.argsort(-counts, kind="stable")])
    place_U = np.argsort(order).astype(np.int32)
    return order, place_U[inverse_E]


def learn(order: np.ndarray, places_E: np.ndarray, previous_E: np.ndarray) -> Candidates:
    """Candidates for entries at int32 [E] ``places_E``, each after the token at ``previous_E``, -1: none."""
    num_ids = len(order)
    count_U = np.bincount(places_E, minlength=num_ids)
    step = max(1, -(-len(places_E) // _SPARE_ENTRIES))
    kept = previous_E >= 0
    places_E, previous_E = places_E[kept][::step], previous_E[kept][::step]
    pairs, num_P = np.unique(previous_E.astype(np.int64) * num_ids + places_E, return_counts=True)
    previous_P, place_P = np.divmod(pairs, max(1, num_ids))
    total_U = np.bincount(previous_E, minlength=num_ids)
    unlisted_P = np.log2(count_U.sum() / count_U[place_P]) + 1.0
    listed_P = np.log2(total_U[previous_P] / num_P) + 0.5
    worth = num_P * step * (unlisted_P - listed_P) > np.minimum(_LISTING_BITS, unlisted_P)
    previous_P, place_P, num_P = previous_P[worth], place_P[worth], num_P[worth]
    by_count = np.lexsort((place_P, -num_P, previous_P))
    previous_P, place_P, num_P = previous_P[by_count], place_P[by_count], num_P[by_count]
    rank_P = np.arange(len(place_P)) - np.searchsorted(previous_P, previous_P)
    kept_P = rank_P < _MAX_LIST
    previous_P, place_P, num_P, rank_P = previous_P[kept_P], place_P[kept_P], num_P[kept_P], rank_P[kept_P]
    previous_L, length_L = np.unique(previous_P, return_counts=True)
    list_of = np.full(num_ids, -1, np.int32)
    list_of[previous_L] = np.arange(len(previous_L))
    in_groups = np.lexsort((place_P, _groups(rank_P, _LIST_GROUPS), previous_P))
    classes = _classify(np.repeat(np.arange(len(previous_L)), length_L), rank_P, num_P, total_U[previous_L])
    return Candidates(order, list_of, _begins(length_L), place_P[in_groups].astype(np.int32), classes)


def _group_sorted(values: np.ndarray) -> np.ndarray:
    """int32: the values of each group of places in ascending order."""
    return values[np.lexsort((values, _groups(np.arange(len(values)), _ORDER_GROUPS)))].astype(np.int32)


def _classify(list_P: np.ndarray, rank_P: np.ndarray, num_P: np.ndarray, total_L: np.ndarray) -> np.ndarray:
    """int32 [L]: lists whose places have like frequencies are of one class; a few rounds of k-means in bits."""
    histogram_LS = np.zeros((len(total_L), ALPHABET))
    np.add.at(histogram_LS, (list_P, _groups(rank_P + 1, _SYMBOLS)), num_P)
    histogram_LS[:, 0] = total_L - histogram_LS.sum(axis=1)  # what is not in the list
    if not len(total_L):
        return np.empty(0, np.int32)
    steepness_L = (histogram_LS[:, :3].sum(axis=1) - 2 * histogram_LS[:, 0]) / np.maximum(total_L, 1)
    classes_L = (np.argsort(np.argsort(steepness_L)) * NUM_CLASSES // len(steepness_L)).astype(np.int32)
    for _ in range(6):
        sums_CS = np.zeros((NUM_CLASSES, ALPHABET))
        np.add.at(sums_CS, classes_L, histogram_LS)
        bits_CS = -np.log2((sums_CS + 1e-3) / (sums_CS + 1e-3).sum(axis=1, keepdims=True))
        classes_L = (histogram_LS @ bits_CS.T).argmin(axis=1).astype(np.int32)
    return classes_L


def pack_order(order: np.ndarray) -> bytes:
    """Ids int32 [U] by place, of which each group ascends, as bytes."""
    one = _begins(np.array([len(order)]))
    return encode_numbers(_gaps(order, one, _ORDER_GROUPS), _gap_contexts(one, _ORDER_GROUPS), _NUM_CONTEXTS)


def unpack_order(data: memoryview, num_ids: int, what: str) -> tuple[np.ndarray, int]:
    """The inverse of ``pack_order``, and how many bytes the ids took; ``what`` is for messages.

    Raises:
        DamageError: ``data`` does not begin with that many ids.
    """
    one, reader = _begins(np.array([num_ids])), NumberReader(data, what)
    order = _undo_gaps(reader.read(_gap_contexts(one, _ORDER_GROUPS)), one, _ORDER_GROUPS)
    reader.finish()
    if order.max(initial=0) > _MAX_ID:
        raise DamageError(f"{what}: ids are below 2^31, found {order.max()}")
    return order.astype(np.int32), reader.num_bytes


def pack(candidates: Candidates) -> bytes:
    """Candidates as bytes; ``unpack`` is the inverse."""
    previous_L = np.flatnonzero(candidates.list_of >= 0)
    lengths_L = np.diff(candidates.begins)
    header = _HEADER.pack(len(candidates.order), len(previous_L), len(candidates.items))
    items = _gaps(candidates.items, candidates.begins, _LIST_GROUPS)
    sequences = [
        (np.diff(previous_L, prepend=-1) - 1, np.zeros(len(previous_L), np.int32)),
        (lengths_L - 1, np.ones(len(previous_L), np.int32)),
        (candidates.classes.astype(np.int64), np.full(len(previous_L), 2, np.int32)),
        (items, _gap_contexts(candidates.begins, _LIST_GROUPS)),
    ]
    return (
        header
        + pack_order(candidates.order)
        + b"".join(encode_numbers(numbers, contexts, _NUM_CONTEXTS) for numbers, contexts in sequences)
    )


def unpack(data: memoryview, max_ids: int) -> tuple[Candidates, int]:
    """Candidates, and how many bytes they took.

    Args:
        data: begins with what ``pack`` returned.
        max_ids: refuse more ids, and more items, than this.

    Raises:
        DamageError: ``data`` is not of that form.
    """
    if len(data) < _HEADER.size:
        raise DamageError("sparse rows: the candidates end too early")
    num_ids, num_lists, num_items = _HEADER.unpack(data[: _HEADER.size])
    if num_ids > max_ids or num_items > max_ids or num_lists > num_items:
        raise DamageError(f"sparse rows: {num_ids} ids, {num_lists} lists, {num_items} items are declared: too many")
    order, used = unpack_order(data[_HEADER.size :], num_ids, "sparse rows: ids")
    position = _HEADER.size + used

    def read(contexts: np.ndarray) -> np.ndarray:
        nonlocal position
        reader = NumberReader(data[position:], "sparse rows: candidates")
        numbers = reader.read(contexts)
        reader.finish()
        position += reader.num_bytes
        return numbers

    previous_L = np.cumsum(read(np.zeros(num_lists, np.int32)) + 1) - 1
    lengths_L = read(np.ones(num_lists, np.int32)) + 1
    classes = read(np.full(num_lists, 2, np.int32))
    if lengths_L.sum() != num_items:
        raise DamageError(f"sparse rows: lists of {lengths_L.sum()} items, {num_items} are declared")
    begins = _begins(lengths_L)
    items = _undo_gaps(read(_gap_contexts(begins, _LIST_GROUPS)), begins, _LIST_GROUPS)
    if max(items.max(initial=-1), previous_L.max(initial=-1)) >= num_ids or classes.max(initial=0) >= NUM_CLASSES:
        raise DamageError("sparse rows: a list names an id or a class that there is not")
    list_of = np.full(num_ids, -1, np.int32)
    list_of[previous_L] = np.arange(num_lists)
    return Candidates(order, list_of, begins, items.astype(np.int32), classes.astype(np.int32)), position


_NUM_CONTEXTS = 16 * 16


def _begins(lengths_L: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths_L)]).astype(np.int64)


def _ranks(begins: np.ndarray) -> np.ndarray:
    """int64 [I]: the place of each item in its list."""
    return np.arange(begins[-1]) - np.repeat(begins[:-1], np.diff(begins))


def _groups(ranks: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return np.searchsorted(groups, ranks, side="right") - 1


def _gap_contexts(begins: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """int32 [I]: by group, and by how many items the list has in it."""
    ranks, lengths = _ranks(begins), np.repeat(np.diff(begins), np.diff(begins))
    group = _groups(ranks, groups)
    size = np.minimum(lengths, groups[group + 1]) - groups[group]
    octave = np.minimum(15, np.floor(np.log2(np.maximum(size, 1))).astype(np.int64))
    return (16 * np.minimum(group, 15) + octave).astype(np.int32)


def _gaps(values: np.ndarray, begins: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """int64 [I]: differences less 1 from the left neighbour within a group, or from -1."""
    ranks, gaps = _ranks(begins), values.astype(np.int64)
    inner = np.flatnonzero(ranks > groups[_groups(ranks, groups)])
    gaps[inner] -= values[inner - 1].astype(np.int64) + 1
    return gaps


def _undo_gaps(gaps: np.ndarray, begins: np.ndarray, groups: np.ndarray) -> np.ndarray:
    ranks = _ranks(begins)
    first = ranks == groups[_groups(ranks, groups)]
    sums = np.cumsum(gaps + ~first)
    starts = np.flatnonzero(first)
    before = np.repeat((sums - gaps)[starts], np.diff(np.append(starts, len(gaps))))
    return sums - before
