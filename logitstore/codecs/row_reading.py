"""Sparse rows popped from the entropy coder, into arrays of the caller's."""

from __future__ import annotations

import numpy as np

from logitstore.codecs.candidates import NUM_CLASSES
from logitstore.codecs.rans import (
    MAX_SET,
    kernel,
    pop_number,
    push_uniform,
)
from logitstore.codecs.row_contexts import (
    ALL_MASS,
    CERTAIN,
    DRAWS,
    FIRST,
    LISTED,
    MAX_TAKEN,
    NO_QUANTA,
    NUM_MASSES,
    ONE_DRAW,
    PLACE,
    REALISED,
    SAMPLED_KIND,
    SAMPLED_QUANTA,
    difference_context,
    kind_of,
    mass_context,
    take_ranks,
)

OK, DAMAGED, FULL = 0, 1, 2


@kernel
def pop_rows(
    num_rows, max_row, state, words, top, ends_CS, symbols_CP, flags, masses, order, list_of, begins, items, classes,
    counts, ids, quanta, draws,
):  # fmt: skip
    """Read rows into counts [num_rows], ids, quanta, draws [entries]; returns status, state, words, entries.

    The status is DAMAGED for what no encoder writes, FULL for more entries than the arrays hold.
    """
    num = 0
    previous = -1
    row_ids, row_places = np.empty(max_row, np.int32), np.empty(max_row, np.int32)
    row_quanta, row_draws = np.empty(max_row, np.uint16), np.empty(max_row, np.uint16)
    taken, ranks = np.empty(MAX_TAKEN, np.int64), np.empty(MAX_SET, np.int64)
    for row in range(num_rows):
        state, top, first = pop_number(state, words, top, ends_CS, symbols_CP, FIRST)
        if top < 0:
            return DAMAGED, state, top, num
        if first == 0:
            counts[row] = 0
            previous = -1
            continue
        first -= 1
        state, top, num_certain = pop_number(state, words, top, ends_CS, symbols_CP, CERTAIN + min(15, first))
        num_certain += 1
        if top < 0 or num_certain > max_row or first > 0xFFFF:
            return DAMAGED, state, top, num
        if num + num_certain > len(ids):
            return FULL, state, top, num
        left, last, mine = ALL_MASS - (masses[first] if first < NUM_MASSES else 0), 0, first
        row_quanta[0] = first
        for place in range(1, num_certain):
            state, top, last = pop_number(state, words, top, ends_CS, symbols_CP, difference_context(place, last))
            mine += last
            if top < 0 or mine > 0xFFFF:
                return DAMAGED, state, top, num
            row_quanta[place] = mine
            left -= masses[mine] if mine < NUM_MASSES else 0
        state, top, num_sampled = pop_number(state, words, top, ends_CS, symbols_CP, mass_context(left))
        count = num_certain + num_sampled
        if top < 0 or count > max_row:
            return DAMAGED, state, top, num
        if num + count > len(ids):
            return FULL, state, top, num
        row_draws[:num_certain] = 0
        mine = 0
        for place in range(num_certain, count):
            row_quanta[place] = 0xFFFF
            row_draws[place] = 1
            if not flags & NO_QUANTA:
                context = SAMPLED_QUANTA + (place > num_certain)
                state, top, last = pop_number(state, words, top, ends_CS, symbols_CP, context)
                mine += last
                if top < 0 or mine > 0xFFFF:
                    return DAMAGED, state, top, num
                row_quanta[place] = mine
            if not flags & ONE_DRAW:
                state, top, last = pop_number(state, words, top, ends_CS, symbols_CP, DRAWS)
                if top < 0 or last >= 0xFFFF:
                    return DAMAGED, state, top, num
                row_draws[place] = last + 1
        context = REALISED + 2 * min(15, first) + (num_certain > 1)
        state, top, realised = pop_number(state, words, top, ends_CS, symbols_CP, context)
        if top < 0 or realised >= num_certain:
            return DAMAGED, state, top, num
        number = list_of[previous] if previous >= 0 else -1
        num_taken = 0
        place = 0
        while place < count:
            limit = min(place + MAX_SET, num_certain if place < num_certain else count)
            stop = place + 1
            while stop < limit and row_quanta[stop] == row_quanta[place]:
                stop += 1
            kind = kind_of(place) if place < num_certain else SAMPLED_KIND
            state, top, num_taken = _pop_set(
                taken, num_taken, ranks, place, stop, row_ids, row_places, kind, number,
                state, words, top, ends_CS, symbols_CP, order, begins, items, classes,
            )  # fmt: skip
            if top < 0:
                return DAMAGED, state, top, num
            place = stop
        _merge(row_ids, row_quanta, row_draws, num_certain, count, realised, ids, quanta, draws, num)
        previous = row_places[realised]
        counts[row] = count
        num += count
    return OK, state, top, num


@kernel
def _pop_set(
    taken, num_taken, ranks, first, stop, ids, places, kind, number,
    state, words, top, ends_CS, symbols_CP, order, begins, items, classes,
):  # fmt: skip
    """Fill ``first`` to ``stop`` of ``ids`` with those of a set, ascending, and of ``places`` with theirs."""
    context, begin, length, num_ranks = 0, 0, 0, 0
    if number >= 0:
        context = LISTED + NUM_CLASSES * kind + classes[number]
        begin = begins[number]
        length = begins[number + 1] - begin
    for end in range(first, stop):
        place = np.int64(-1)
        if number >= 0:
            state, top, rank = pop_number(state, words, top, ends_CS, symbols_CP, context)
            rank -= 1
            if top < 0:
                return state, -1, 0
            if rank >= 0:
                at = 0
                while at < num_taken and taken[at] <= rank:
                    rank += 1
                    at += 1
                if rank >= length:
                    return state, -1, 0
                ranks[num_ranks] = rank
                num_ranks += 1
                place = np.int64(items[begin + rank])
        if place < 0:
            state, top, place = pop_number(state, words, top, ends_CS, symbols_CP, PLACE + kind)
            if top < 0 or place >= len(order):
                return state, -1, 0
        mine = order[place]
        at = end
        while at > first and ids[at - 1] > mine:
            ids[at], places[at] = ids[at - 1], places[at - 1]
            at -= 1
        ids[at], places[at] = mine, place
        if end > first:
            state, top = push_uniform(state, words, top, at - first, end - first + 1)
            if top < 0:
                return state, -1, 0
    return state, top, num_taken if kind == SAMPLED_KIND else take_ranks(taken, num_taken, ranks, num_ranks)


@kernel
def _merge(row_ids, row_quanta, row_draws, num_certain, count, realised, ids, quanta, draws, num):
    """The realised entry, then the others of two ascending runs in ascending order."""
    ids[num], quanta[num], draws[num] = row_ids[realised], row_quanta[realised], 0
    num += 1
    left, right = 0, num_certain
    while left < num_certain or right < count:
        if left == realised:
            left += 1
            continue
        take_left = right >= count
        if not take_left and left < num_certain:
            take_left = row_quanta[left] < row_quanta[right] or (
                row_quanta[left] == row_quanta[right] and row_ids[left] < row_ids[right]
            )
        source = left if take_left else right
        ids[num], quanta[num], draws[num] = row_ids[source], row_quanta[source], row_draws[source]
        num += 1
        if take_left:
            left += 1
        else:
            right += 1
