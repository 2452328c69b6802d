"""Manifests: identity from content alone, and nothing lost on the way to Parquet and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from logitstore.column_cells import Cell, ColumnCells
from logitstore.digests import digest_bytes, digest_json
from logitstore.manifest import Column, Manifest
from logitstore.plan import Plan, PlanBlock, PlanSettings
from logitstore.recipes import Answer

BLOCKS = tuple(PlanBlock(f"{n}" * 64, "train", 1, 5, (1,), (0,)) for n in range(3))
PLAN = Plan(PlanSettings(4096, 0), BLOCKS, ("a.jsonl",))
TEXT = {"kind": "text", "version": "1"}
SIGNAL = {"kind": "signal", "signal": "sparse", "tokens": "t", "selection": {"policy": "topk", "k": "4"}}


def digest(name: str) -> str:
    return digest_bytes(name.encode())


def cell(name: str, num_rows: int = 3, num_bytes: int = 9) -> Cell:
    stats = {"num_rows": num_rows, "bytes.x": num_bytes}
    return Cell(digest(f"part {name}"), digest(f"content {name}"), stats)


COLUMNS = (
    Column(TEXT, "text", (cell("a"), cell("b"), cell("c")), {"bytes": {"fill_value": 0}}, ((2, "ef" * 32), (3, ""))),
    Column(SIGNAL, "teacher", (cell("d"), None, cell("f"))),
)
MANIFEST = Manifest("ab" * 32, PLAN, COLUMNS)


@pytest.mark.parametrize(
    "manifest",
    [MANIFEST, replace(MANIFEST, columns=()), replace(MANIFEST, columns=(replace(COLUMNS[1], cells=(None,) * 3),))],
    ids=["with a hole", "no columns", "nothing but holes"],
)
def test_manifest_reads_back(manifest):
    asked = []
    found = Manifest.from_parquet(manifest.to_parquet(), lambda digest: asked.append(digest) or PLAN)
    assert found == manifest
    assert asked == ["ab" * 32]
    assert found.identity == manifest.identity
    assert found.to_parquet() == manifest.to_parquet()


def test_manifest_of_a_plan_without_blocks_reads_back():
    empty = Manifest("ab" * 32, Plan(PLAN.settings, (), ()), (replace(COLUMNS[0], cells=()),))
    assert Manifest.from_parquet(empty.to_parquet(), lambda digest: empty.plan) == empty


@pytest.mark.parametrize(
    "same",
    [
        replace(MANIFEST, columns=COLUMNS[::-1]),
        replace(MANIFEST, columns=tuple(replace(column, label="renamed") for column in COLUMNS)),
        replace(MANIFEST, columns=tuple(replace(column, schemas={}, pages=()) for column in COLUMNS)),
        replace(MANIFEST, plan_digest="cd" * 32, plan=replace(PLAN, sources=("elsewhere",))),
        replace(
            MANIFEST,
            columns=tuple(
                replace(
                    column,
                    cells=tuple(c and replace(c, part=digest("re-encoded"), stats={}) for c in column.cells),
                )
                for column in COLUMNS
            ),
        ),
    ],
    ids=["order", "labels", "indexes", "paths", "encoding"],
)
def test_identity_ignores_all_but_content(same):
    assert same.identity == MANIFEST.identity
    assert same.to_parquet() != MANIFEST.to_parquet()


@pytest.mark.parametrize(
    "other",
    [
        replace(MANIFEST, columns=COLUMNS[:1]),
        replace(MANIFEST, columns=(COLUMNS[0], replace(COLUMNS[1], cells=(cell("d"), cell("e"), cell("f"))))),
        replace(MANIFEST, columns=(replace(COLUMNS[0], cells=(cell("b"), cell("a"), cell("c"))), COLUMNS[1])),
        replace(MANIFEST, columns=(COLUMNS[0], replace(COLUMNS[1], template={**SIGNAL, "tokens": "u"}))),
        replace(MANIFEST, plan=replace(PLAN, blocks=(replace(BLOCKS[0], multiplicities=(2,)), *BLOCKS[1:]))),
    ],
    ids=["fewer columns", "filled hole", "other content", "other template", "other plan"],
)
def test_identity_sees_content(other):
    assert other.identity != MANIFEST.identity


def test_column_of_answers_sums_and_keeps_holes():
    p, c, q, d = map(digest, "pcqd")
    first = {"num_rows": 5, "num_scored": 4, "bytes.sparse": 30, "bytes.metadata": 2}
    second = {"num_rows": 7, "num_scored": 7, "bytes.sparse": 50}
    answers = [Answer({"part": p, "content": c}, first), None, Answer({"part": q, "content": d}, second)]
    column = Column.of_answers(SIGNAL, "teacher", answers)
    assert list(column.cells) == [Cell(p, c, first), None, Cell(q, d, second)]
    assert [cell and (cell.num_rows, cell.num_bytes) for cell in column.cells] == [(5, 32), None, (7, 50)]
    assert column.cells.num_bytes == 82
    assert column.stats == {"num_rows": 12, "num_scored": 11, "bytes.sparse": 80, "bytes.metadata": 2}
    assert (column.num_holes, column.kind, column.id) == (1, "signal", digest_json(SIGNAL))
    assert column.part_digests() == {p, q}


# Cells

CELLS = ColumnCells.of([cell("a"), None, cell("c", 4)])


def test_cells_are_a_sequence():
    assert len(CELLS) == 3
    assert CELLS[1:] == (None, cell("c", 4))
    assert (CELLS[0], CELLS[-1], CELLS[-2]) == (cell("a"), cell("c", 4), None)
    with pytest.raises(IndexError):
        CELLS[3]
    assert ColumnCells.of([cell("a"), None, cell("c")]) != CELLS
    assert ColumnCells.of([cell("a"), cell("b"), cell("c", 4)]) != CELLS
    assert ColumnCells.of(CELLS) is CELLS


def test_cells_taken_in_another_order():
    assert list(CELLS.take(np.array([2, -1, 0, 1, 2]))) == [cell("c", 4), None, cell("a"), None, cell("c", 4)]
    assert list(ColumnCells.empty(0).take(np.array([-1, -1]))) == [None, None]


def test_cells_that_are_left_out_leave_nothing_behind():
    assert CELLS.only(np.array([True, True, False])) == ColumnCells.of([cell("a"), None, None])
    assert CELLS.only(np.zeros(3, bool)).identity == ColumnCells.empty(3).identity


def test_answers_are_added_and_replaced():
    changed = CELLS.with_answers([(1, cell("b")), (2, Cell(digest("p"), digest("c"), {"other": 2}))])
    assert list(changed) == [cell("a"), cell("b"), Cell(digest("p"), digest("c"), {"other": 2})]
    assert list(CELLS) == [cell("a"), None, cell("c", 4)]


def test_find_by_kind_and_fields():
    assert list(MANIFEST.find("signal", signal="sparse")) == [COLUMNS[1]]
    assert list(MANIFEST.find("signal", signal="scalars")) == list(MANIFEST.find("tokens")) == []
    assert MANIFEST.column(COLUMNS[0].id) == COLUMNS[0]
    assert MANIFEST.column("nothing") is None


def test_with_columns_adds_and_replaces():
    newer = replace(COLUMNS[1], cells=(cell("d"), cell("e"), cell("f")))
    added = Column({**SIGNAL, "signal": "scalars"}, "teacher", (None,) * 3)
    assert MANIFEST.with_columns([newer, added]).columns == (COLUMNS[0], newer, added)
    assert MANIFEST.with_columns([]) == MANIFEST


def test_page_of_a_block_and_its_place_there():
    pages = ((2, "aa"), (3, ""), (7, "bb"))
    column = Column(TEXT, "text", (None,) * 7, {}, pages)
    assert [column.page_of(n) for n in range(7)] == [
        ("aa", 0), ("aa", 1), None, ("bb", 0), ("bb", 1), ("bb", 2), ("bb", 3)
    ]  # fmt: skip
    assert column.page_digests() == {"aa", "bb"}
    assert replace(column, pages=()).page_of(0) is None
