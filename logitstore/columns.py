"""Columns: from a template and a block to the recipe, the answer, and the next version of a dataset.

A template is a recipe less what differs from block to block; what it adds there are the contents of the columns it
builds on. So whatever any worker has answered for a block can be found again from templates and the plan alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import numpy as np

from logitstore.column_cells import ColumnCells
from logitstore.digests import digest_json, pack_digests
from logitstore.dropped import dropped_parts
from logitstore.manifest import Column, Manifest
from logitstore.plan import Plan
from logitstore.recipes import Answer, Recipe
from logitstore.storage import map_threads
from logitstore.store import Store
from logitstore.text_parts import TEXT_TEMPLATE, text_recipe

Template = Mapping[str, Any]

TEXT_ID = digest_json(TEXT_TEMPLATE)
_DEPENDENCY_ORDER = ("text", "tokens", "signal", "alignment")


def inputs_of(template: Template) -> dict[str, str]:
    """The columns that a template builds on: field of the recipe -> column id."""
    match template["kind"]:
        case "text":
            return {}
        case "tokens":
            return {"text": TEXT_ID}
        case "signal":
            return {"tokens_content": template["tokens"]}
        case "alignment":
            return {"teacher_content": template["teacher_tokens"], "student_content": template["student_tokens"]}
    raise AssertionError(f"unknown kind of column {template['kind']!r}")


def recipe_for(template: Template, block: str, answers: Mapping[str, Answer]) -> Recipe | None:
    """The recipe of a column for a block, or None while an answer that it builds on is missing.

    Args:
        template: of the column.
        block: digest of the block.
        answers: by column id, what is known for this block.
    """
    inputs = inputs_of(template)
    if any(column not in answers for column in inputs.values()):
        return None
    return _recipe(template, block, {name: answers[column].content for name, column in inputs.items()})


def _recipe(template: Template, block: str, contents: Mapping[str, str]) -> Recipe:
    return text_recipe(block) if template["kind"] == "text" else {**template, **contents}


class Answers(Sequence[dict[str, Answer]]):
    """For each block of a plan, the stored answers by column id.

    Attributes:
        cells: by column id, one for each block.
    """

    def __init__(self, cells: Mapping[str, ColumnCells], num_blocks: int) -> None:
        self.cells, self._num_blocks = cells, num_blocks

    def __len__(self) -> int:
        return self._num_blocks

    @overload
    def __getitem__(self, block: int) -> dict[str, Answer]: ...
    @overload
    def __getitem__(self, block: slice) -> list[dict[str, Answer]]: ...
    def __getitem__(self, block: int | slice) -> dict[str, Answer] | list[dict[str, Answer]]:
        if isinstance(block, slice):
            return [self[number] for number in range(*block.indices(len(self)))]
        found = ((column, cells[block]) for column, cells in self.cells.items())
        return {column: cell.answer() for column, cell in found if cell is not None}

    def lacking(self, columns: Iterable[str]) -> set[int]:
        """Blocks where the answer of some of these columns is missing."""
        whole = np.ones(len(self), bool)
        for column in columns:
            whole &= self.cells[column].answered
        return set(np.flatnonzero(~whole).tolist())


def find_answers(store: Store, plan: Plan, templates: Iterable[Template], known: Manifest | None = None) -> Answers:
    """For each block of a plan, the stored answers by column id: those of the text and of the templates.

    Args:
        store: where to look.
        plan: its blocks.
        templates: of the columns.
        known: a version whose cells need not be asked for again. Only for what it lacks, and for what a repair has
            dropped since, are recipes looked up: many at once.
    """
    wanted = {digest_json(template): template for template in (TEXT_TEMPLATE, *templates)}
    ordered = sorted(wanted.items(), key=lambda item: _DEPENDENCY_ORDER.index(item[1]["kind"]))
    remembered = _Remembered(store, plan, known)
    found: dict[str, ColumnCells] = {}
    for column, template in ordered:
        found[column] = _look_up(store, plan, template, found, remembered.cells(column, template, found))
    return Answers(found, len(plan.blocks))


def _look_up(
    store: Store, plan: Plan, template: Template, found: Mapping[str, ColumnCells], cells: ColumnCells
) -> ColumnCells:
    """``cells`` with what the store has answered where they have nothing."""
    inputs = {name: found[column] for name, column in inputs_of(template).items() if column in found}
    if len(inputs) < len(inputs_of(template)):
        return cells
    can_be_answered = np.logical_and.reduce([~cells.answered, *(cell.answered for cell in inputs.values())])
    blocks = np.flatnonzero(can_be_answered).tolist()

    def look(block: int) -> Answer | None:
        contents = {name: cells.contents[block].tobytes().hex() for name, cells in inputs.items()}
        return store.answer(_recipe(template, plan.blocks.digests[block], contents))

    answers = zip(blocks, map_threads(look, blocks), strict=True)
    return cells.with_answers((block, answer) for block, answer in answers if answer is not None)


class _Remembered:
    """What a version of the dataset says of the blocks of a plan, as far as it still holds."""

    def __init__(self, store: Store, plan: Plan, known: Manifest | None) -> None:
        self._known, self._num_blocks = known, len(plan.blocks)
        if known is not None:
            places = {digest: number for number, digest in enumerate(known.plan.blocks.digests)}
            self._places = np.array([places.get(digest, -1) for digest in plan.blocks.digests], np.int64)
            self._dropped = pack_digests(sorted(dropped_parts(store.storage)))

    def cells(self, column: str, template: Template, found: Mapping[str, ColumnCells]) -> ColumnCells:
        """Of a column whose inputs are in ``found``; an answer counts while its inputs are still the same."""
        described = self._known.column(column) if self._known else None
        if self._known is None or described is None:
            return ColumnCells.empty(self._num_blocks)
        cells = described.cells.take(self._places)
        holds = ~_rows_in(cells.parts, self._dropped)
        for input_column in inputs_of(template).values():
            built_on = self._known.column(input_column)
            if built_on is None or input_column not in found:
                return ColumnCells.empty(self._num_blocks)
            before, now = built_on.cells.take(self._places), found[input_column]
            holds &= now.answered & (before.contents == now.contents).all(axis=1)
        return cells.only(holds)


def _rows_in(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """bool [N]: which of the digests uint8 [N, 32] are among ``others``, by their first 64 bits.

    One that is not, but begins like one, is asked for once more than it need be.
    """
    begins = [np.ascontiguousarray(packed[:, :8]).view(np.uint64)[:, 0] for packed in (rows, others)]
    return np.isin(begins[0], begins[1])


def next_manifest(
    store: Store, current: Manifest | None, plan_digest: str, requested: Mapping[str, tuple[Template, str]]
) -> Manifest:
    """The version of a dataset that has this plan, the columns of ``current`` and the requested ones.

    Args:
        store: where the answers are.
        current: newest version, if there is one.
        plan_digest: of the plan.
        requested: by column id, (template, label).
    """
    wanted = {column.id: (column.template, column.label) for column in current.columns} if current else {}
    wanted |= {TEXT_ID: (TEXT_TEMPLATE, "text"), **requested}
    plan = store.plan(plan_digest)
    found = find_answers(store, plan, [template for template, _ in wanted.values()], current)
    columns = [Column(template, label, found.cells[column_id]) for column_id, (template, label) in wanted.items()]
    columns.sort(key=lambda column: (_DEPENDENCY_ORDER.index(column.kind), column.id))
    return Manifest(plan_digest, plan, tuple(columns))
