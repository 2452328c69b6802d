"""Manifests: one version of a dataset, a plan and columns of parts by block.

A manifest is a Parquet object: a row a block, and for each column the part's digest, its content digest, its rows and
its stored bytes. Its header holds the columns' templates. ``identity`` is a function of content alone: which workers
wrote it, in what order, with which codecs, and what the columns are called, is not in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from logitstore.digests import digest_json
from logitstore.plan import Plan
from logitstore.recipes import Answer


@dataclass(frozen=True)
class Cell:
    """A column's part for one block."""

    part: str
    content: str
    num_rows: int
    num_bytes: int


@dataclass(frozen=True)
class Column:
    """One kind of answer for every block.

    Attributes:
        template: the recipe without what differs from block to block; its digest is the column's ``id``.
        label: what people call it: a teacher's name, a tokenizer's. No part of the identity.
        cells: by block; None where the block has no answer yet (a hole).
        stats: whole numbers summed over the blocks.
    """

    template: Mapping[str, Any]
    label: str
    cells: tuple[Cell | None, ...]
    stats: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def id(self) -> str:
        return digest_json(self.template)

    @property
    def kind(self) -> str:
        return self.template["kind"]

    @property
    def num_holes(self) -> int:
        return sum(cell is None for cell in self.cells)

    @classmethod
    def of_answers(cls, template: Mapping[str, Any], label: str, answers: list[Answer | None]) -> Column:
        stats: dict[str, int] = {}
        cells: list[Cell | None] = []
        for answer in answers:
            if answer is None:
                cells.append(None)
                continue
            for name, value in answer.stats.items():
                stats[name] = stats.get(name, 0) + value
            num_bytes = sum(value for name, value in answer.stats.items() if name.startswith("bytes."))
            cells.append(Cell(answer.part, answer.content, answer.stats.get("num_rows", 0), num_bytes))
        return cls(template, label, tuple(cells), stats)


@dataclass(frozen=True)
class Manifest:
    plan_digest: str
    plan: Plan
    columns: tuple[Column, ...]

    @cached_property
    def identity(self) -> str:
        """What inspect calls ``manifest_digest``."""
        columns = {
            column.id: [None if cell is None else cell.content for cell in column.cells] for column in self.columns
        }
        return digest_json({"plan": self.plan.identity, "columns": columns})

    def find(self, kind: str, **fields: Any) -> Iterator[Column]:
        """Columns of a kind whose template has these fields."""
        for column in self.columns:
            if column.kind == kind and all(column.template.get(name) == value for name, value in fields.items()):
                yield column

    def column(self, column_id: str) -> Column | None:
        return next((column for column in self.columns if column.id == column_id), None)

    def with_columns(self, columns: list[Column]) -> Manifest:
        """This version with columns added, or put in the place of those with the same id."""
        new = {column.id: column for column in columns}
        kept = tuple(column for column in self.columns if column.id not in new)
        return replace(self, columns=(*kept, *new.values()))

    def to_parquet(self) -> bytes:
        header = {
            "format": 1,
            "plan": self.plan_digest,
            "columns": [
                {"template": dict(column.template), "label": column.label, "stats": dict(column.stats)}
                for column in self.columns
            ],
        }
        data: dict[str, pa.Array] = {"block": pa.array([block.digest for block in self.plan.blocks], pa.string())}
        for number, column in enumerate(self.columns):
            for name, kind in _CELL_FIELDS.items():
                values = [None if cell is None else getattr(cell, name) for cell in column.cells]
                data[f"{number}.{name}"] = pa.array(values, kind)
        table = pa.table(data).replace_schema_metadata({"logitstore": json.dumps(header, sort_keys=True)})
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        return sink.getvalue().to_pybytes()

    @classmethod
    def from_parquet(cls, data: bytes, read_plan: Callable[[str], Plan]) -> Manifest:
        """Decode a manifest; ``read_plan`` maps a plan's digest to the plan."""
        table = pq.read_table(pa.BufferReader(data))
        header = json.loads(table.schema.metadata[b"logitstore"])
        columns = []
        for number, description in enumerate(header["columns"]):
            values = [table.column(f"{number}.{name}").to_pylist() for name in _CELL_FIELDS]
            cells = tuple(None if row[0] is None else Cell(*row) for row in zip(*values, strict=True))
            columns.append(Column(description["template"], description["label"], cells, description["stats"]))
        return cls(header["plan"], read_plan(header["plan"]), tuple(columns))


_CELL_FIELDS = {"part": pa.string(), "content": pa.string(), "num_rows": pa.int64(), "num_bytes": pa.int64()}
