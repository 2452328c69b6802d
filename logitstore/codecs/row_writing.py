"""Sparse rows written down as numbers, so that they can be counted, then pushed backwards onto the entropy coder."""

from __future__ import annotations

import numpy as np

from logitstore.codecs.candidates import NUM_CLASSES
from logitstore.codecs.rans import (
    INITIAL_STATE,
    MAX_SET,
    kernel,
    pop_uniform,
    push_number,
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

NOTHING, SET_OF = -1, -2
"""In the place of a context: no number here; a set of so many pairs of numbers begins or ends."""


@kernel
def rank_entries(places_E, previous_E, list_of, begins, sorted_items, sorted_ranks):
    """int32 [E]: the rank of each entry's id in the list of the token before, -1 where it is not listed.

    ``sorted_items`` holds each list's items in ascending order, ``sorted_ranks`` their ranks in the list.
    """
    ranks_E = np.full(len(places_E), -1, np.int32)
    for entry in range(len(places_E)):
        if previous_E[entry] < 0 or list_of[previous_E[entry]] < 0:
            continue
        number, place = list_of[previous_E[entry]], places_E[entry]
        low, high = begins[number], begins[number + 1]
        while low < high:
            middle = (low + high) >> 1
            if sorted_items[middle] < place:
                low = middle + 1
            else:
                high = middle
        if low < begins[number + 1] and sorted_items[low] == place:
            ranks_E[entry] = sorted_ranks[low]
    return ranks_E


@kernel
def write_rows(
    begin, end, offsets, ids, quanta, draws, places, ranks, flags, masses, list_of, classes, contexts_N, numbers_N
):  # fmt: skip
    """Write rows ``begin`` to ``end`` down as numbers in contexts: how many, or -1 - row of one in another order.

    ``contexts_N`` and ``numbers_N`` hold 6 for a row and 6 for an entry at least.
    """
    num = 0
    previous = -1
    largest = 0
    for row in range(begin, end):
        largest = max(largest, offsets[row + 1] - offsets[row])
    certain, sampled = np.empty(largest, np.int64), np.empty(largest, np.int64)
    taken, scratch = np.empty(MAX_TAKEN, np.int64), np.empty(MAX_SET, np.int64)
    for row in range(begin, end):
        if offsets[row] == offsets[row + 1]:
            contexts_N[num], numbers_N[num] = FIRST, 0
            num += 1
            previous = -1
            continue
        num_certain, num_sampled, realised = _split(
            offsets[row], offsets[row + 1], ids, quanta, draws, certain, sampled
        )
        if num_certain < 0:
            return -1 - row
        first = np.int64(quanta[certain[0]])
        contexts_N[num], numbers_N[num] = FIRST, first + 1
        contexts_N[num + 1], numbers_N[num + 1] = CERTAIN + min(15, first), num_certain - 1
        num += 2
        left, last = ALL_MASS - (masses[first] if first < NUM_MASSES else 0), 0
        for place in range(1, num_certain):
            mine = np.int64(quanta[certain[place]])
            contexts_N[num] = difference_context(place, last)
            last = mine - np.int64(quanta[certain[place - 1]])
            numbers_N[num] = last
            num += 1
            left -= masses[mine] if mine < NUM_MASSES else 0
        contexts_N[num], numbers_N[num] = mass_context(left), num_sampled
        num += 1
        for place in range(num_sampled):
            if not flags & NO_QUANTA:
                before = np.int64(quanta[sampled[place - 1]]) if place else 0
                contexts_N[num] = SAMPLED_QUANTA + (place > 0)
                numbers_N[num] = np.int64(quanta[sampled[place]]) - before
                num += 1
            if not flags & ONE_DRAW:
                contexts_N[num], numbers_N[num] = DRAWS, np.int64(draws[sampled[place]]) - 1
                num += 1
        contexts_N[num], numbers_N[num] = REALISED + 2 * min(15, first) + (num_certain > 1), realised
        num += 1
        number = list_of[previous] if previous >= 0 else -1
        num_taken = 0
        for which in range(2):
            members, size = (certain, num_certain) if which == 0 else (sampled, num_sampled)
            place = 0
            while place < size:
                stop = place + 1
                while stop < size and stop < place + MAX_SET and quanta[members[stop]] == quanta[members[place]]:
                    stop += 1
                base = -1 if number < 0 else LISTED + classes[number]
                num, num_taken = _write_set(
                    place, stop, members, SAMPLED_KIND if which else kind_of(place), base, places, ranks,
                    taken, num_taken, scratch, contexts_N, numbers_N, num,
                )  # fmt: skip
                place = stop
        previous = places[offsets[row]]
    return num


@kernel
def _split(begin, end, ids, quanta, draws, certain, sampled):
    """Certain entries in order, the realised one at its place, and sampled ones: how many, how many, its place.

    -1 where the first entry is sampled, or the others are not in ascending order of (quanta, id).
    """
    if draws[begin] > 0:
        return -1, 0, 0
    num_certain, num_sampled, realised = 0, 0, -1
    for entry in range(begin + 1, end):
        if entry > begin + 1:
            ahead = quanta[entry] > quanta[entry - 1]
            if not ahead and not (quanta[entry] == quanta[entry - 1] and ids[entry] > ids[entry - 1]):
                return -1, 0, 0
        if draws[entry] > 0:
            sampled[num_sampled] = entry
            num_sampled += 1
            continue
        if realised < 0 and (
            quanta[entry] > quanta[begin] or (quanta[entry] == quanta[begin] and ids[entry] > ids[begin])
        ):
            realised = num_certain
            certain[num_certain] = begin
            num_certain += 1
        if quanta[entry] == quanta[begin] and ids[entry] == ids[begin]:
            return -1, 0, 0
        certain[num_certain] = entry
        num_certain += 1
    if realised < 0:
        realised = num_certain
        certain[num_certain] = begin
        num_certain += 1
    return num_certain, num_sampled, realised


@kernel
def _write_set(
    first, stop, members, kind, base, places, ranks, taken, num_taken, mine, contexts_N, numbers_N, num
):  # fmt: skip
    """Write a set of entries, those of ``first`` to ``stop``; numbers written and ranks taken thereafter."""
    size, num_mine = stop - first, 0
    if size > 1:
        contexts_N[num], numbers_N[num] = SET_OF, size
        num += 1
    for at in range(first, stop):
        entry = members[at]
        rank = np.int64(ranks[entry])
        contexts_N[num], numbers_N[num] = NOTHING, 0
        if base >= 0:
            free_rank = rank
            if rank >= 0:
                mine[num_mine] = rank
                num_mine += 1
                for before in range(num_taken):
                    if taken[before] > rank:
                        break
                    free_rank -= 1
            contexts_N[num], numbers_N[num] = base + NUM_CLASSES * kind, free_rank + 1
        contexts_N[num + 1], numbers_N[num + 1] = (NOTHING, 0) if rank >= 0 else (PLACE + kind, places[entry])
        num += 2
    if size > 1:
        contexts_N[num], numbers_N[num] = SET_OF, size
        num += 1
    return num, num_taken if kind == SAMPLED_KIND else take_ranks(taken, num_taken, mine, num_mine)


@kernel
def push_rows(contexts_N, numbers_N, ends_CS, words, seeds):
    """Push what ``write_rows`` wrote, last first, onto ``seeds`` zero words; state, words, most words there ever were.

    -1 words where a set wanted more bits to choose by than there were: more seeds are needed.
    """
    state, top, highest = np.uint64(INITIAL_STATE), seeds, seeds
    words[:seeds] = 0
    waiting = np.empty(MAX_SET, np.int64)
    at = len(contexts_N) - 1
    while at >= 0 and top >= 0:
        context = contexts_N[at]
        if context == SET_OF:
            size = numbers_N[at]
            for member in range(size):
                waiting[member] = at - 2 * (size - member)
            for left in range(size, 0, -1):
                chosen = 0
                if left > 1:
                    state, top, chosen = pop_uniform(state, words, top, left)
                    if top < 0:
                        return state, -1, highest
                pair = waiting[chosen]
                waiting[chosen : left - 1] = waiting[chosen + 1 : left]
                for half in range(1, -1, -1):
                    if contexts_N[pair + half] >= 0:
                        state, top = push_number(
                            state, words, top, ends_CS, contexts_N[pair + half], numbers_N[pair + half]
                        )
                highest = max(highest, top)
            at -= 2 * size + 2
            continue
        if context >= 0:
            state, top = push_number(state, words, top, ends_CS, context, numbers_N[at])
            highest = max(highest, top)
        at -= 1
    return state, top, highest
