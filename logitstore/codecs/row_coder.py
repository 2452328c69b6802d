"""Kernels that turn sparse rows into pushes of an entropy coder and back.

A row is stored as

    first + 1     quanta of its likeliest entry; 0: the row is empty
    certain - 1   entries kept for certain, the realised token among them             given first
    differences   between the quanta of neighbours, ascending                         given place, last difference
    sampled       entries kept by a draw                                              given the mass that is left
    sampled's quanta, as differences, and draws less 1, where the chunk has any
    realised      which of the certain entries is the realised token                  given first
    ids           of the certain entries, then of the sampled ones

An id is told by its rank in the list of the token before, among those that the row does not have yet, else by its
place.

Entries of equal quanta are a set: their order says nothing, so it is not paid for. The encoder lets the bits that are
already in the coder choose which member comes next (Townsend, Bird, Barber 2019, "bits back"; Severo et al. 2022 for
multisets); the decoder sorts the members and puts those bits back: log2(n!) bits saved of n members.

The encoder first writes down numbers and contexts in the order of reading (``write_rows``), so that they can be
counted, and then pushes them backwards (``push_rows``).
"""

from __future__ import annotations

import numpy as np

from logitstore.codecs.candidates import NUM_CLASSES
from logitstore.codecs.rans import (
    INITIAL_STATE,
    MAX_SET,
    kernel,
    pop_number,
    pop_uniform,
    push_number,
    push_uniform,
    symbol_of,
)

NO_QUANTA, ONE_DRAW = 1, 2
"""Flags of a chunk: no sampled entry has quanta; each was drawn once."""

# Contexts. Places of an id's neighbours fall into 8 kinds, see _kind_of.
_FIRST = 0
_CERTAIN = 1
_DIFFERENCE = _CERTAIN + 16
_SAMPLED = _DIFFERENCE + 64
_SAMPLED_QUANTA = _SAMPLED + 128
_DRAWS = _SAMPLED_QUANTA + 2
_REALISED = _DRAWS + 1
_PLACE = _REALISED + 32
_LISTED = _PLACE + 8
NUM_CONTEXTS = _LISTED + 8 * NUM_CLASSES

_SAMPLED_KIND = 7

_NOTHING, _SET = -1, -2
"""In the place of a context: no number here; a set of so many pairs of numbers begins or ends."""

_MAX_TAKEN = 512
"""So many candidates that a row has already are left out of the count when a later one's place is told."""

_ONE = 1 << 32
_MASS_TABLE = 512

OK, DAMAGED, FULL = 0, 1, 2


@kernel
def mass_table(decay):
    """int64 [512]: exp(-quanta * step) in units of 2^-32, by products with ``decay``, which is that of one quantum."""
    table = np.zeros(_MASS_TABLE, np.int64)
    table[0] = _ONE
    for quanta in range(1, _MASS_TABLE):
        table[quanta] = np.int64((np.uint64(table[quanta - 1]) * np.uint64(decay)) >> np.uint64(32))
    return table


@kernel
def _mass_context(left):
    """The mass outside the certain entries, in quarters of an octave: it says how many were sampled from it."""
    left = max(left, 8)
    octave = 3
    while left >> (octave + 1):
        octave += 1
    return _SAMPLED + min(127, 4 * octave + ((left >> (octave - 2)) & 3))


@kernel
def _kind_of(place):
    """0: likeliest, 1: second, 2 to 6: octaves of what follows."""
    if place < 2:
        return place
    if place < 4:
        return 2
    if place < 8:
        return 3
    if place < 16:
        return 4
    return 5 if place < 48 else 6


@kernel
def _difference_context(place, last):
    return _DIFFERENCE + 4 * min(15, symbol_of(place) if place < 8 else 4 + (symbol_of(place) >> 2)) + min(3, last)


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
    taken, scratch = np.empty(_MAX_TAKEN, np.int64), np.empty(MAX_SET, np.int64)
    for row in range(begin, end):
        if offsets[row] == offsets[row + 1]:
            contexts_N[num], numbers_N[num] = _FIRST, 0
            num += 1
            previous = -1
            continue
        num_certain, num_sampled, realised = _split(
            offsets[row], offsets[row + 1], ids, quanta, draws, certain, sampled
        )
        if num_certain < 0:
            return -1 - row
        first = np.int64(quanta[certain[0]])
        contexts_N[num], numbers_N[num] = _FIRST, first + 1
        contexts_N[num + 1], numbers_N[num + 1] = _CERTAIN + min(15, first), num_certain - 1
        num += 2
        left, last = _ONE - (masses[first] if first < _MASS_TABLE else 0), 0
        for place in range(1, num_certain):
            mine = np.int64(quanta[certain[place]])
            contexts_N[num] = _difference_context(place, last)
            last = mine - np.int64(quanta[certain[place - 1]])
            numbers_N[num] = last
            num += 1
            left -= masses[mine] if mine < _MASS_TABLE else 0
        contexts_N[num], numbers_N[num] = _mass_context(left), num_sampled
        num += 1
        for place in range(num_sampled):
            if not flags & NO_QUANTA:
                before = np.int64(quanta[sampled[place - 1]]) if place else 0
                contexts_N[num] = _SAMPLED_QUANTA + (place > 0)
                numbers_N[num] = np.int64(quanta[sampled[place]]) - before
                num += 1
            if not flags & ONE_DRAW:
                contexts_N[num], numbers_N[num] = _DRAWS, np.int64(draws[sampled[place]]) - 1
                num += 1
        contexts_N[num], numbers_N[num] = _REALISED + 2 * min(15, first) + (num_certain > 1), realised
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
                base = -1 if number < 0 else _LISTED + classes[number]
                num, num_taken = _write_set(
                    place, stop, members, _SAMPLED_KIND if which else _kind_of(place), base, places, ranks,
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
        contexts_N[num], numbers_N[num] = _SET, size
        num += 1
    for at in range(first, stop):
        entry = members[at]
        rank = np.int64(ranks[entry])
        contexts_N[num], numbers_N[num] = _NOTHING, 0
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
        contexts_N[num + 1], numbers_N[num + 1] = (_NOTHING, 0) if rank >= 0 else (_PLACE + kind, places[entry])
        num += 2
    if size > 1:
        contexts_N[num], numbers_N[num] = _SET, size
        num += 1
    return num, num_taken if kind == _SAMPLED_KIND else _take(taken, num_taken, mine, num_mine)


@kernel
def _take(taken, num_taken, ranks, num_ranks):
    """Insert ranks into the ascending ones that are taken, as long as all of them fit; how many are taken then."""
    if num_taken + num_ranks > len(taken):
        return num_taken
    for number in range(num_ranks):
        at = num_taken
        while at > 0 and taken[at - 1] > ranks[number]:
            taken[at] = taken[at - 1]
            at -= 1
        taken[at] = ranks[number]
        num_taken += 1
    return num_taken


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
        if context == _SET:
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
    taken, ranks = np.empty(_MAX_TAKEN, np.int64), np.empty(MAX_SET, np.int64)
    for row in range(num_rows):
        state, top, first = pop_number(state, words, top, ends_CS, symbols_CP, _FIRST)
        if top < 0:
            return DAMAGED, state, top, num
        if first == 0:
            counts[row] = 0
            previous = -1
            continue
        first -= 1
        state, top, num_certain = pop_number(state, words, top, ends_CS, symbols_CP, _CERTAIN + min(15, first))
        num_certain += 1
        if top < 0 or num_certain > max_row or first > 0xFFFF:
            return DAMAGED, state, top, num
        if num + num_certain > len(ids):
            return FULL, state, top, num
        left, last, mine = _ONE - (masses[first] if first < _MASS_TABLE else 0), 0, first
        row_quanta[0] = first
        for place in range(1, num_certain):
            state, top, last = pop_number(state, words, top, ends_CS, symbols_CP, _difference_context(place, last))
            mine += last
            if top < 0 or mine > 0xFFFF:
                return DAMAGED, state, top, num
            row_quanta[place] = mine
            left -= masses[mine] if mine < _MASS_TABLE else 0
        state, top, num_sampled = pop_number(state, words, top, ends_CS, symbols_CP, _mass_context(left))
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
                context = _SAMPLED_QUANTA + (place > num_certain)
                state, top, last = pop_number(state, words, top, ends_CS, symbols_CP, context)
                mine += last
                if top < 0 or mine > 0xFFFF:
                    return DAMAGED, state, top, num
                row_quanta[place] = mine
            if not flags & ONE_DRAW:
                state, top, last = pop_number(state, words, top, ends_CS, symbols_CP, _DRAWS)
                if top < 0 or last >= 0xFFFF:
                    return DAMAGED, state, top, num
                row_draws[place] = last + 1
        context = _REALISED + 2 * min(15, first) + (num_certain > 1)
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
            kind = _kind_of(place) if place < num_certain else _SAMPLED_KIND
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
        context = _LISTED + NUM_CLASSES * kind + classes[number]
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
            state, top, place = pop_number(state, words, top, ends_CS, symbols_CP, _PLACE + kind)
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
    return state, top, num_taken if kind == _SAMPLED_KIND else _take(taken, num_taken, ranks, num_ranks)


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
