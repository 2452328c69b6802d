"""Columns: from a template and a block to the recipe, the answer, and the next version of a dataset.

A template is a recipe less what differs from block to block; what it adds there are the contents of the columns it
builds on. So whatever any worker has answered for a block can be found again from templates and the plan alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from logitstore.digests import digest_json
from logitstore.manifest import Column, Manifest
from logitstore.plan import Plan
from logitstore.recipes import Answer, Recipe
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
    if template["kind"] == "text":
        return text_recipe(block)
    inputs = inputs_of(template)
    if any(column not in answers for column in inputs.values()):
        return None
    return {**template, **{name: answers[column].content for name, column in inputs.items()}}


def find_answers(store: Store, plan: Plan, templates: Iterable[Template]) -> list[dict[str, Answer]]:
    """For each block of a plan, the stored answers by column id: those of the text and of the templates."""
    wanted = {digest_json(template): template for template in (TEXT_TEMPLATE, *templates)}
    ordered = sorted(wanted.values(), key=lambda template: _DEPENDENCY_ORDER.index(template["kind"]))
    found: list[dict[str, Answer]] = []
    for block in plan.blocks:
        answers: dict[str, Answer] = {}
        for template in ordered:
            recipe = recipe_for(template, block.digest, answers)
            answer = store.answer(recipe) if recipe is not None else None
            if answer is not None:
                answers[digest_json(template)] = answer
        found.append(answers)
    return found


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
    answers = find_answers(store, plan, [template for template, _ in wanted.values()])
    columns = [
        Column.of_answers(template, label, [by_block.get(column_id) for by_block in answers])
        for column_id, (template, label) in wanted.items()
    ]
    columns.sort(key=lambda column: (_DEPENDENCY_ORDER.index(column.kind), column.id))
    return Manifest(plan_digest, plan, tuple(columns))
