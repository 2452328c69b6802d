"""Sparse rows as bytes: a model of all rows, then the rows in groups that can be read alone.

    version u32 · model bytes u32 · rows u64 · entries u64 · groups u32 · group rows u32 · widest row u32 · flags u32 ·
    decay u32 · CRC32C u32                                                                         little-endian
    model    candidates (see ``candidates``), then zstd of the frequency tables
    index    per group: coder's state u64 · words u32 · seeds u32 · entries u32 · CRC32C u32
    groups   words, uint32

The CRC32C of the header covers header, model and index; that of a group its words. ``decay`` is exp(-step), in units of
2^-32. Rows have to be in the order of ``logitstore.sparse``; those rows come back exactly.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from google_crc32c import extend as crc32c_extend
from google_crc32c import value as crc32c

from logitstore.codecs import candidates, row_reading
from logitstore.codecs.numbers import checked_tables, unpack_frequencies
from logitstore.codecs.rans import INITIAL_STATE
from logitstore.codecs.row_contexts import NUM_CONTEXTS, mass_table
from logitstore.errors import DamageError
from logitstore.sparse import SparseRows, offsets_of

VERSION = 1
GROUP_ROWS = 4096
"""A reader of one row reads and decodes this many."""
MAX_ROW_ENTRIES = 0xFFFF

HEADER = struct.Struct("<IIQQIIIIII")
INDEX = np.dtype([("state", "<u8"), ("words", "<u4"), ("seeds", "<u4"), ("entries", "<u4"), ("crc", "<u4")])
SPARE_WORDS = 4096
"""A set that is being read puts back words before it is done; never more than these."""
HEADER_BYTES = HEADER.size


@dataclass(frozen=True)
class Header:
    """What the first ``HEADER_BYTES`` say."""

    model_bytes: int
    num_rows: int
    num_entries: int
    num_groups: int
    group_rows: int
    width: int
    flags: int
    decay: int
    crc: int

    @property
    def front_bytes(self) -> int:
        """Bytes of header, model and index."""
        return HEADER_BYTES + self.model_bytes + INDEX.itemsize * self.num_groups

    @classmethod
    def parse(cls, data: bytes | memoryview) -> Header:
        """Raises DamageError unless ``data`` begins with a header whose fields agree."""
        if len(data) < HEADER_BYTES:
            raise DamageError(f"sparse rows: a header of {HEADER_BYTES} bytes was expected, found {len(data)}")
        version, *fields = HEADER.unpack(data[:HEADER_BYTES])
        if version != VERSION:
            raise DamageError(f"sparse rows: version {VERSION} was expected, found {version}")
        header = cls(*fields)
        if header.group_rows < 1 or header.num_groups != -(-header.num_rows // header.group_rows):
            raise DamageError(
                f"sparse rows: {header.num_groups} groups of {header.group_rows} for {header.num_rows} rows"
            )
        if header.width > MAX_ROW_ENTRIES or header.num_entries > header.num_rows * header.width:
            raise DamageError(f"sparse rows: {header.num_entries} entries in rows of at most {header.width}")
        return header


class RowReader:
    """Decodes rows of one stream, all or some groups of them.

    Attributes:
        header: the stream's.
    """

    def __init__(self, front: bytes | memoryview, max_rows: int | None = None, max_entries: int | None = None) -> None:
        """Read the model and the index.

        Args:
            front: the first ``Header.front_bytes`` of a stream, or more.
            max_rows, max_entries: refuse to allocate for more than this.

        Raises:
            DamageError: these are not such bytes.
        """
        front = memoryview(front)
        self.header = header = Header.parse(front)
        for what, found, most in (("rows", header.num_rows, max_rows), ("entries", header.num_entries, max_entries)):
            if most is not None and found > most:
                raise DamageError(f"sparse rows: at most {most} {what} fit the array, {found} are declared")
        if header.front_bytes > len(front):
            raise DamageError(f"sparse rows: {header.front_bytes} bytes of model were expected, found {len(front)}")
        computed = front_crc(front[: header.front_bytes])
        if computed != header.crc:
            raise DamageError(f"sparse rows: CRC32C {header.crc:08x} is stored, {computed:08x} computed")
        model_end = HEADER_BYTES + header.model_bytes
        model = front[HEADER_BYTES:model_end]
        self._candidates, used = candidates.unpack(model, header.num_entries)
        frequencies_CS = unpack_frequencies(model[used:], NUM_CONTEXTS, "sparse rows")
        self._tables = checked_tables(frequencies_CS, "sparse rows")
        self._index = np.frombuffer(front[model_end : header.front_bytes], INDEX)
        self._masses = mass_table(header.decay)
        if self._index["entries"].sum(dtype=np.int64) != header.num_entries:
            raise DamageError("sparse rows: the groups' entries do not add up")
        self._word_begins = np.concatenate([[0], np.cumsum(self._index["words"], dtype=np.int64)])
        self.num_bytes = header.front_bytes + 4 * int(self._word_begins[-1])

    def group_bytes(self, first: int, last: int) -> tuple[int, int]:
        """Where the words of groups ``first`` to ``last`` (not included) begin and end in the stream."""
        begin = self.header.front_bytes
        return begin + 4 * int(self._word_begins[first]), begin + 4 * int(self._word_begins[last])

    def read(
        self, words: bytes | memoryview, first: int = 0, last: int | None = None, step_nats: float = 0.1
    ) -> SparseRows:
        """Rows of groups ``first`` to ``last``.

        Args:
            words: the bytes that ``group_bytes`` names.
            first: group.
            last: group, not included; all by default.
            step_nats: of the quanta, for the result.
        """
        last = self.header.num_groups if last is None else last
        num_rows = min(self.header.num_rows, last * self.header.group_rows) - first * self.header.group_rows
        num_entries = int(self._index["entries"][first:last].sum(dtype=np.int64))
        counts = np.empty(max(0, num_rows), np.int64)
        ids, quanta = np.empty(num_entries, np.int32), np.empty(num_entries, np.uint16)
        draws = np.empty(num_entries, np.uint16)
        self.read_into(words, counts, ids, quanta, draws, first, last)
        return SparseRows(offsets_of(counts), ids, quanta, draws, step_nats)

    def read_into(
        self,
        words: bytes | memoryview,
        counts: np.ndarray,
        ids: np.ndarray,
        quanta: np.ndarray,
        draws: np.ndarray,
        first: int = 0,
        last: int | None = None,
    ) -> None:
        """As ``read``, into the caller's arrays: int64 [rows], int32, uint16 and uint16 [entries].

        Raises:
            DamageError: a checksum does not hold, or the words are not such rows.
        """
        last = self.header.num_groups if last is None else last
        words_ = memoryview(words)
        expected = 4 * int(self._word_begins[last] - self._word_begins[first])
        if len(words_) != expected:
            raise DamageError(f"sparse rows: {expected} bytes of rows were expected, found {len(words_)}")
        byte, row, entry = 0, 0, 0
        for group in range(first, last):
            mine = self._index[group]
            num_bytes, num_entries = 4 * int(mine["words"]), int(mine["entries"])
            num_rows = min(self.header.group_rows, self.header.num_rows - group * self.header.group_rows)
            self._read_group(
                group,
                words_[byte : byte + num_bytes],
                counts[row : row + num_rows],
                ids[entry : entry + num_entries],
                quanta[entry : entry + num_entries],
                draws[entry : entry + num_entries],
            )
            byte, row, entry = byte + num_bytes, row + num_rows, entry + num_entries

    def _read_group(self, group: int, data: memoryview, counts: np.ndarray, *entries: np.ndarray) -> None:
        mine, header, model = self._index[group], self.header, self._candidates
        if (computed := crc32c(bytes(data))) != mine["crc"]:
            raise DamageError(
                f"sparse rows: group {group}: CRC32C {mine['crc']:08x} is stored, {computed:08x} computed"
            )
        if not INITIAL_STATE <= mine["state"] < INITIAL_STATE << 32:
            raise DamageError(f"sparse rows: group {group}: not a state of the coder")
        words = np.empty(int(mine["words"]) + SPARE_WORDS, np.uint32)
        words[: mine["words"]] = np.frombuffer(data, "<u4")
        status, state, top, num = row_reading.pop_rows(
            len(counts), header.width, mine["state"], words, int(mine["words"]), *self._tables, header.flags,
            self._masses, model.order, model.list_of, model.begins, model.items, model.classes, counts, *entries,
        )  # fmt: skip
        if status != row_reading.OK or num != len(entries[0]):
            raise DamageError(f"sparse rows: group {group}: not what was declared, after {num} entries")
        if state != INITIAL_STATE or top != mine["seeds"] or words[:top].any():
            raise DamageError(f"sparse rows: group {group}: holds more than was declared")


def decode_rows(data: bytes | memoryview, max_rows: int | None = None, max_entries: int | None = None) -> SparseRows:
    """The inverse of ``row_encoder.encode_rows``.

    Args:
        data: a stream.
        max_rows, max_entries: refuse to allocate for more than this.

    Raises:
        DamageError: ``data`` is not of that form.
    """
    reader = RowReader(data, max_rows, max_entries)
    if len(data) != reader.num_bytes:
        raise DamageError(f"sparse rows: {reader.num_bytes} bytes were declared, found {len(data)}")
    return reader.read(memoryview(data)[reader.header.front_bytes :])


def front_crc(front: memoryview) -> int:
    """CRC32C of header, model and index, without the checksum's own field."""
    return crc32c_extend(crc32c(bytes(front[: HEADER_BYTES - 4])), bytes(front[HEADER_BYTES:]))
