"""How a sparse row is told as numbers, each in a context.

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

This file has what writing (``row_writing``) and reading (``row_reading``) share: which context a number stands in.
"""

from __future__ import annotations

import numpy as np

from logitstore.codecs.candidates import NUM_CLASSES
from logitstore.codecs.rans import (
    kernel,
    symbol_of,
)

NO_QUANTA, ONE_DRAW = 1, 2
"""Flags of a chunk: no sampled entry has quanta; each was drawn once."""

# Contexts. Places of an id's neighbours fall into 8 kinds, see kind_of.
FIRST = 0
CERTAIN = 1
DIFFERENCE = CERTAIN + 16
SAMPLED = DIFFERENCE + 64
SAMPLED_QUANTA = SAMPLED + 128
DRAWS = SAMPLED_QUANTA + 2
REALISED = DRAWS + 1
PLACE = REALISED + 32
LISTED = PLACE + 8
NUM_CONTEXTS = LISTED + 8 * NUM_CLASSES

SAMPLED_KIND = 7

MAX_TAKEN = 512
"""So many candidates that a row has already are left out of the count when a later one's place is told."""

ALL_MASS = 1 << 32
NUM_MASSES = 512


@kernel
def mass_table(decay):
    """int64 [512]: exp(-quanta * step) in units of 2^-32, by products with ``decay``, which is that of one quantum."""
    table = np.zeros(NUM_MASSES, np.int64)
    table[0] = ALL_MASS
    for quanta in range(1, NUM_MASSES):
        table[quanta] = np.int64((np.uint64(table[quanta - 1]) * np.uint64(decay)) >> np.uint64(32))
    return table


@kernel
def mass_context(left):
    """The mass outside the certain entries, in quarters of an octave: it says how many were sampled from it."""
    left = max(left, 8)
    octave = 3
    while left >> (octave + 1):
        octave += 1
    return SAMPLED + min(127, 4 * octave + ((left >> (octave - 2)) & 3))


@kernel
def kind_of(place):
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
def difference_context(place, last):
    return DIFFERENCE + 4 * min(15, symbol_of(place) if place < 8 else 4 + (symbol_of(place) >> 2)) + min(3, last)


@kernel
def take_ranks(taken, num_taken, ranks, num_ranks):
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
