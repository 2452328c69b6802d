"""Manifests: one version of a dataset, a plan and columns of parts by block.

A manifest is a Parquet object: a row a block, and for each column the part's digest, its content digest and its
statistics. Its header holds the columns' templates, one copy of each array's schema, and the names of the pages that
list the parts' objects (``index_pages``). ``identity`` is a function of content alone: which workers wrote it, in what
order, with which codecs, and what the columns are called, is not in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from logitstore import tables
from logitstore.column_cells import Cell, ColumnCells
from logitstore.digests import digest_json
from logitstore.plan import Plan
from logitstore.recipes import Answer

__all__ = ["Cell", "Column", "Manifest"]


@dataclass(frozen=True)
class Column:
    """One kind of answer for every block.

    Attributes:
        template: the recipe without what differs from block to block; its digest is the column's ``id``.
        label: what people call it: a teacher's name, a tokenizer's. No part of the identity.
        cells: by block, any iterable of ``Cell | None`` will do; it is kept as columns. None where the block has no
            answer yet (a hole).
        schemas: by array, what ``zarr.json`` says less the shapes: one copy for all parts.
        pages: of the index pages, the block after the last one, and the digest (empty if none of the blocks has an
            answer). None until it is published.
    """

    template: Mapping[str, Any]
    label: str
    cells: ColumnCells
    schemas: Mapping[str, Any] = field(default_factory=dict)
    pages: tuple[tuple[int, str], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "cells", ColumnCells.of(self.cells))

    @cached_property
    def id(self) -> str:
        return digest_json(self.template)

    @property
    def kind(self) -> str:
        return self.template["kind"]

    def page_of(self, block: int) -> tuple[str, int] | None:
        """Digest of a block's index page and the block's number within it, or None if there is none."""
        page = bisect_right(self.pages, block, key=lambda described: described[0])
        if page == len(self.pages) or not self.pages[page][1]:
            return None
        return self.pages[page][1], block - (self.pages[page - 1][0] if page else 0)

    def page_digests(self) -> set[str]:
        return {digest for _, digest in self.pages if digest}

    @property
    def num_holes(self) -> int:
        return int((~self.cells.answered).sum())

    @cached_property
    def stats(self) -> dict[str, int]:
        """Whole numbers summed over the blocks."""
        return {name: int(values.sum()) for name, values in self.cells.stats.items()}

    def part_digests(self) -> set[str]:
        """Of all blocks that have an answer."""
        return self.cells.part_digests()

    @classmethod
    def of_answers(cls, template: Mapping[str, Any], label: str, answers: Iterable[Answer | None]) -> Column:
        return cls(template, label, ColumnCells.of(answers))


@dataclass(frozen=True)
class Manifest:
    """A version of a dataset.

    Attributes:
        plan_digest: of the plan object.
        plan: its blocks.
        columns: their answers.
    """

    plan_digest: str
    plan: Plan
    columns: tuple[Column, ...]

    @cached_property
    def identity(self) -> str:
        """What inspect calls ``manifest_digest``."""
        columns = {column.id: column.cells.identity for column in self.columns}
        return digest_json({"plan": self.plan.identity, "columns": columns})

    def find(self, kind: str, **fields: Any) -> Iterator[Column]:
        """Columns of a kind whose template has these fields."""
        for column in self.columns:
            if column.kind == kind and all(column.template.get(name) == value for name, value in fields.items()):
                yield column

    def part_digests(self) -> set[str]:
        """Of all columns and blocks."""
        return set().union(*(column.part_digests() for column in self.columns))

    def page_digests(self) -> set[str]:
        """Of all columns."""
        return set().union(*(column.page_digests() for column in self.columns))

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
                {
                    "template": dict(column.template),
                    "label": column.label,
                    "schemas": dict(column.schemas),
                    "pages": list(column.pages),
                }
                for column in self.columns
            ],
        }
        data = {"block": tables.from_digests(self.plan.blocks.packed_digests)}
        for number, column in enumerate(self.columns):
            data |= column.cells.to_columns(f"{number}.")
        return tables.write_table(data, header)

    @classmethod
    def from_parquet(cls, data: bytes, read_plan: Callable[[str], Plan]) -> Manifest:
        """Decode a manifest; ``read_plan`` maps a plan's digest to the plan."""
        table = tables.StoredTable(data)
        header = table.header
        columns = tuple(
            Column(
                described["template"],
                described["label"],
                ColumnCells.from_table(table, f"{number}."),
                described["schemas"],
                tuple((end, digest) for end, digest in described["pages"]),
            )
            for number, described in enumerate(header["columns"])
        )
        return cls(header["plan"], read_plan(header["plan"]), columns)
