"""``given:URL``: ids supplied from outside, such as a student's own top-k, kept for certain.

A Parquet file with columns ``document`` (hexadecimal digest of the document), ``position`` (of the token within it, in
the teacher's tokens) and ``ids`` (list of token ids). Rows that are not in it keep the realised token and the argmax
alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from logitstore.digests import digest_arrays
from logitstore.errors import ConfigError
from logitstore.producer.policy import Policy, Rows, places
from logitstore.sparse import offsets_of
from logitstore.token_parts import TokenBlock

_COLUMNS = ("document", "position", "ids")


@dataclass(frozen=True)
class GivenRows:
    """Ids for the T rows of a block, ragged: those of row t from ``offsets[t]`` to ``offsets[t + 1]``."""

    offsets: np.ndarray
    ids: np.ndarray

    def table(self, rows: np.ndarray) -> np.ndarray:
        """int64 [R, K] ids of some rows, -1 for none."""
        begins, counts = self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows]
        within = np.arange(counts.max(initial=0))
        filled = within < counts[:, None]
        table = np.full(filled.shape, -1, np.int64)
        table[filled] = self.ids[(begins[:, None] + within)[filled]]
        return table


@dataclass(frozen=True, eq=False)
class GivenIds:
    """Ids of a whole dataset, ordered by (document, position).

    Attributes:
        url: where they were read from.
        rows_of: begin and end of each document's rows, by its hexadecimal digest.
        positions: int64 [R].
        offsets: int64 [R + 1] into ``ids``.
        ids: int32.
    """

    url: str
    rows_of: dict[str, tuple[int, int]] = field(repr=False)
    positions: np.ndarray = field(repr=False)
    offsets: np.ndarray = field(repr=False)
    ids: np.ndarray = field(repr=False)

    @cached_property
    def digest(self) -> str:
        """Of the content, whatever file it came in."""
        documents = np.frombuffer(bytes.fromhex("".join(self.rows_of)), np.uint8)
        ends = np.array([end for _, end in self.rows_of.values()], np.int64)
        arrays = {"positions": self.positions, "offsets": self.offsets, "ids": self.ids}
        return digest_arrays({"documents": documents, "ends": ends, **arrays})

    @classmethod
    def read(cls, url: str) -> GivenIds:
        """Read such a file from any fsspec URL.

        Raises:
            ConfigError: it cannot be read, lacks a column, or says something twice or impossible.
        """
        where = f"--select given:{url}"
        try:
            with fsspec.open(url, "rb") as file:
                table = pq.read_table(file)
        except (OSError, ValueError, ImportError, pa.ArrowException) as error:
            raise ConfigError(f"{where}: cannot read a Parquet file there: {str(error).splitlines()[0]}") from error
        if missing := [name for name in _COLUMNS if name not in table.column_names]:
            found = ", ".join(table.column_names)
            raise ConfigError(f"{where}: expected columns {', '.join(_COLUMNS)}; {missing[0]} is not among {found}")
        try:
            table = table.select(_COLUMNS).cast(
                pa.schema([("document", pa.string()), ("position", pa.int64()), ("ids", pa.list_(pa.int64()))])
            )
        except (pa.ArrowException, ValueError) as error:
            raise ConfigError(f"{where}: expected text, whole numbers and lists of whole numbers: {error}") from error
        table = table.sort_by([("document", "ascending"), ("position", "ascending")]).combine_chunks()
        if any(table[name].null_count for name in _COLUMNS):
            raise ConfigError(f"{where}: found rows without a document, position or list of ids")
        lists = pa.concat_arrays(table["ids"].chunks) if table.num_rows else pa.array([], pa.list_(pa.int64()))
        if (flat := lists.flatten()).null_count:
            raise ConfigError(f"{where}: found a list of ids with nothing in one of its places")
        ids = flat.to_numpy(zero_copy_only=False)
        if len(ids) and not 0 <= ids.min() <= ids.max() < 1 << 31:
            raise ConfigError(f"{where}: token ids are whole numbers from 0, found {ids.min()} to {ids.max()}")
        counts = lists.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
        positions = table["position"].to_numpy()
        return cls(url, _runs(where, table["document"], positions), positions, offsets_of(counts), ids.astype(np.int32))

    def block(self, documents: list[str], tokens: TokenBlock) -> GivenRows:
        """What is given for a block.

        Args:
            documents: hexadecimal digest of each of its documents.
            tokens: of the block.

        Raises:
            ConfigError: a position past the end of its document.
        """
        rows, picked = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for document, begin, end in zip(documents, tokens.begins.tolist(), tokens.ends.tolist(), strict=True):
            first, last = self.rows_of.get(document, (0, 0))
            positions = self.positions[first:last]
            if len(positions) and not 0 <= positions[0] <= positions[-1] < end - begin:
                raise ConfigError(
                    f"--select given:{self.url}: document {document[:16]} has {end - begin} tokens of this teacher, "
                    f"found positions {positions[0]} to {positions[-1]}"
                )
            rows.append(begin + positions)
            picked.append(np.arange(first, last))
        row, place = np.concatenate(rows), np.concatenate(picked)
        counts = np.zeros(tokens.num_tokens, np.int64)
        counts[row] = self.offsets[place + 1] - self.offsets[place]
        kept = [self.ids[self.offsets[n] : self.offsets[n + 1]] for n in place.tolist()]
        return GivenRows(offsets_of(counts), np.concatenate([np.empty(0, np.int32), *kept]))


@dataclass(frozen=True)
class Given(Policy):
    """What ``Rows.given_RK`` lists."""

    source: GivenIds

    @property
    def max_entries(self) -> int:
        return int(np.diff(self.source.offsets).max(initial=0))

    def to_json(self) -> dict[str, object]:
        return {"policy": "given", "digest": self.source.digest}

    def check_vocabulary(self, size: int, where: str) -> None:
        """Refuse ids that a teacher does not have.

        Raises:
            ConfigError: naming the largest.
        """
        if (largest := int(self.source.ids.max(initial=-1))) >= size:
            raise ConfigError(
                f"--select given:{self.source.url}: token id {largest} is outside the vocabulary of {where}, which has "
                f"{size} tokens; give ids of that teacher's tokenizer"
            )

    def keep(self, rows: Rows) -> Tensor:
        assert rows.given_RK is not None, "who selects by given ids hands them over with the rows"
        return places(rows.given_RK, rows.logits_RV.shape[-1])[rows.given_RK >= 0]


def _runs(where: str, documents: pa.ChunkedArray, positions: np.ndarray) -> dict[str, tuple[int, int]]:
    """Begin and end of each document's rows, which are sorted."""
    names = documents.unique().to_pylist()
    for name in names:
        if len(name) != 64 or set(name) - set("0123456789abcdef"):
            raise ConfigError(f"{where}: documents are named by digests of 64 hexadecimal digits, found {name!r}")
    sizes = {counted["values"]: counted["counts"] for counted in documents.value_counts().to_pylist()}
    ends = np.cumsum([sizes[name] for name in names], dtype=np.int64)
    runs = {name: (int(end) - sizes[name], int(end)) for name, end in zip(names, ends, strict=True)}
    for name, (begin, end) in runs.items():
        twice = np.flatnonzero(np.diff(positions[begin:end]) == 0)
        if len(twice):
            raise ConfigError(f"{where}: position {positions[begin + twice[0]]} of document {name} is given twice")
    return runs
