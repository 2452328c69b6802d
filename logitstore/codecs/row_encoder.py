"""Sparse rows to a stream (``row_stream``): learn a model of all rows, then write them group by group."""

from __future__ import annotations

import numpy as np
from google_crc32c import value as crc32c

from logitstore.codecs import candidates
from logitstore.codecs.candidates import Candidates
from logitstore.codecs.numbers import pack_tables
from logitstore.codecs.rans import ALPHABET, Tables, count_symbols, frequencies_of, tables_of
from logitstore.codecs.row_contexts import NO_QUANTA, NUM_CONTEXTS, ONE_DRAW, mass_table
from logitstore.codecs.row_stream import (
    GROUP_ROWS,
    HEADER,
    HEADER_BYTES,
    INDEX,
    MAX_ROW_ENTRIES,
    SPARE_WORDS,
    VERSION,
    front_crc,
)
from logitstore.codecs.row_writing import push_rows, rank_entries, write_rows
from logitstore.sparse import NOT_STORED, SparseRows


def encode_rows(rows: SparseRows, group_rows: int = GROUP_ROWS) -> bytes:
    """Ragged rows to a stream.

    Raises:
        ValueError: a row is not in the order of ``logitstore.sparse``, or has more than 65535 entries.
    """
    if rows.counts.max(initial=0) > MAX_ROW_ENTRIES or rows.ids.min(initial=0) < 0:
        longest, smallest = rows.counts.max(initial=0), rows.ids.min(initial=0)
        raise ValueError(
            f"sparse rows hold up to {MAX_ROW_ENTRIES} entries a row and ids from 0, found {longest} and {smallest}"
        )
    decay = min((1 << 32) - 1, round(np.exp(-rows.step_nats) * (1 << 32)))
    writer = RowWriter(rows, group_rows, decay)
    bounds = [(begin, min(begin + group_rows, rows.num_rows)) for begin in range(0, rows.num_rows, group_rows)]
    counts_CS = np.zeros((NUM_CONTEXTS, ALPHABET), np.int64)
    for begin, end in bounds:
        count_symbols(*writer.write(begin, end), counts_CS)
    frequencies_CS = frequencies_of(counts_CS)
    tables = tables_of(frequencies_CS)
    model = candidates.pack(writer.candidates) + pack_tables(frequencies_CS)
    index = np.zeros(len(bounds), INDEX)
    groups = []
    for group, (begin, end) in enumerate(bounds):
        state, words, seeds = _push(*writer.write(begin, end), tables)
        groups.append(words.astype("<u4").tobytes())
        num_entries = rows.offsets[end] - rows.offsets[begin]
        index[group] = (state, len(words), seeds, num_entries, crc32c(groups[-1]))
    fields = (
        VERSION, len(model), rows.num_rows, rows.num_entries, len(bounds), group_rows, int(rows.counts.max(initial=0)),
        writer.flags, decay,
    )  # fmt: skip
    front = HEADER.pack(*fields, 0) + model + index.tobytes()
    return b"".join([HEADER.pack(*fields, front_crc(memoryview(front))), front[HEADER_BYTES:], *groups])


class RowWriter:
    """Writes rows down as numbers in contexts, with what was learnt from all of them."""

    def __init__(self, rows: SparseRows, group_rows: int, decay: int) -> None:
        self._rows = rows
        self._masses = mass_table(decay)
        sampled = rows.draws > 0
        self.flags = NO_QUANTA if (rows.quanta[sampled] == NOT_STORED).all() else 0
        self.flags |= ONE_DRAW if (rows.draws[sampled] == 1).all() else 0
        order, self._places = candidates.place_ids(rows.ids)
        previous = _previous(rows, self._places, group_rows)
        self.candidates = model = candidates.learn(order, self._places, previous)
        self._ranks = rank_entries(self._places, previous, model.list_of, model.begins, *_ranks_by_place(model))

    def write(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Contexts int32 [N] and numbers int64 [N] of rows ``begin`` to ``end``."""
        rows, model = self._rows, self.candidates
        size = 6 * (end - begin) + 6 * int(rows.offsets[end] - rows.offsets[begin])
        contexts, numbers = np.empty(size, np.int32), np.empty(size, np.int64)
        num = write_rows(
            begin, end, rows.offsets, rows.ids, rows.quanta, rows.draws, self._places, self._ranks, self.flags,
            self._masses, model.list_of, model.classes, contexts, numbers,
        )  # fmt: skip
        if num < 0:
            raise ValueError(
                f"sparse rows: row {-1 - num}: the first entry is the realised token, kept for certain, and the others "
                "follow once each in ascending order of (quanta, id)"
            )
        return contexts[:num], numbers[:num]


def _previous(rows: SparseRows, places: np.ndarray, group_rows: int) -> np.ndarray:
    """int32 [E]: the place of the token before an entry's; -1 where a group begins or the row before is empty."""
    counts = rows.counts
    realised_T = np.full(rows.num_rows, -1, np.int32)
    realised_T[counts > 0] = places[rows.offsets[:-1][counts > 0]]
    previous_T = np.concatenate([np.full(1, -1, np.int32), realised_T])[:-1]
    previous_T[::group_rows] = -1
    return np.repeat(previous_T, counts)


def _ranks_by_place(model: Candidates) -> tuple[np.ndarray, np.ndarray]:
    """Each list's items in ascending order, and their ranks in the list, int32 [I] both."""
    lists = np.repeat(np.arange(len(model.classes)), np.diff(model.begins))
    ascending = np.lexsort((model.items, lists))
    ranks = np.arange(len(lists)) - model.begins[lists]
    return model.items[ascending], ranks[ascending].astype(np.int32)


def _push(contexts: np.ndarray, numbers: np.ndarray, tables: Tables) -> tuple[int, np.ndarray, int]:
    """State, words and number of seeds of a group."""
    seeds = 0
    while True:
        words = np.zeros(2 * len(numbers) + seeds + 2, np.uint32)
        state, top, highest = push_rows(contexts, numbers, tables.ends, words, seeds)
        if top >= 0:
            if highest > top + SPARE_WORDS:
                raise AssertionError(f"a set puts back {highest - top} words, {SPARE_WORDS} are spared")
            return int(state), words[:top], seeds
        seeds = max(4, 2 * seeds)
