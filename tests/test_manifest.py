"""Manifests: identity from content alone, and nothing lost on the way to Parquet and back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from logitstore.digests import digest_json
from logitstore.manifest import Cell, Column, Manifest
from logitstore.plan import Plan, PlanBlock, PlanSettings
from logitstore.recipes import Answer

BLOCKS = tuple(PlanBlock(f"{n}" * 64, "train", 1, 5, (1,), (0,)) for n in range(3))
PLAN = Plan(PlanSettings(4096, 0), BLOCKS, ("a.jsonl",))
TEXT = {"kind": "text", "version": "1"}
SIGNAL = {"kind": "signal", "signal": "sparse", "tokens": "t", "selection": {"policy": "topk", "k": "4"}}


def cell(name: str, num_rows: int = 3, num_bytes: int = 9) -> Cell:
    return Cell(f"part {name}", f"content {name}", num_rows, num_bytes)


COLUMNS = (
    Column(TEXT, "text", (cell("a"), cell("b"), cell("c")), {"num_rows": 9}),
    Column(SIGNAL, "teacher", (cell("d"), None, cell("f")), {"num_rows": 6}),
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
        replace(MANIFEST, columns=tuple(replace(column, stats={"num_rows": 1}) for column in COLUMNS)),
        replace(MANIFEST, plan_digest="cd" * 32, plan=replace(PLAN, sources=("elsewhere",))),
        replace(
            MANIFEST,
            columns=tuple(
                replace(
                    column,
                    cells=tuple(c and replace(c, part="re-encoded", num_bytes=1) for c in column.cells),
                )
                for column in COLUMNS
            ),
        ),
    ],
    ids=["order", "labels", "stats", "paths", "encoding"],
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
    answers = [
        Answer(
            {"part": "p", "content": "c"}, {"num_rows": 5, "num_scored": 4, "bytes.sparse": 30, "bytes.metadata": 2}
        ),
        None,
        Answer({"part": "q", "content": "d"}, {"num_rows": 7, "num_scored": 7, "bytes.sparse": 50}),
    ]
    column = Column.of_answers(SIGNAL, "teacher", answers)
    assert column.cells == (Cell("p", "c", 5, 32), None, Cell("q", "d", 7, 50))
    assert column.stats == {"num_rows": 12, "num_scored": 11, "bytes.sparse": 80, "bytes.metadata": 2}
    assert (column.num_holes, column.kind, column.id) == (1, "signal", digest_json(SIGNAL))


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
