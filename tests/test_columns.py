"""Columns: recipes from templates, answers found again from the plan alone, and the next version of a dataset."""

from __future__ import annotations

from uuid import uuid4

import numpy as np
import pytest

from logitstore.columns import TEXT_ID, find_answers, inputs_of, next_manifest, recipe_for
from logitstore.digests import digest_json
from logitstore.dropped import mark_dropped
from logitstore.manifest import Manifest
from logitstore.plan import Plan, PlanBlock, PlanSettings
from logitstore.recipes import Answer, recipe_path
from logitstore.staging import ArrayToStore, stage
from logitstore.store import Store
from logitstore.text_parts import TEXT_TEMPLATE, text_recipe

TOKENS = {"kind": "tokens", "version": "1", "tokenizer": "t"}
STUDENT = {"kind": "tokens", "version": "1", "tokenizer": "s"}
TOKENS_ID, STUDENT_ID = digest_json(TOKENS), digest_json(STUDENT)
SIGNAL = {"kind": "signal", "version": "1", "teacher": "x", "tokens": TOKENS_ID}
ALIGNMENT = {"kind": "alignment", "version": "1", "teacher_tokens": TOKENS_ID, "student_tokens": STUDENT_ID}
TEMPLATES = [ALIGNMENT, SIGNAL, STUDENT, TOKENS]  # not in the order in which they build on each other

BLOCKS = tuple(PlanBlock(f"{n}" * 64, "train", 1, 5, (1,), (0,)) for n in range(3))
PLAN = Plan(PlanSettings(4096, 0), BLOCKS, ("a.jsonl",))


def answer_of(content: str) -> Answer:
    return Answer({"part": f"part of {content}", "content": content}, {})


def commit(store: Store, recipe, value: int) -> Answer:
    part = stage("tokens", {"x": ArrayToStore(np.full(3, value))}, {})
    return store.commit_part(recipe, part, {"num_rows": 3}, {})


@pytest.fixture
def store():
    return Store.open_or_create(f"memory://{uuid4().hex}")


@pytest.fixture
def plan_digest(store):
    return store.put_plan(PLAN)


def fill(store: Store, templates, blocks=BLOCKS) -> None:
    ordered = [TEXT_TEMPLATE, *(template for template in TEMPLATES[::-1] if template in templates)]
    for number, block in enumerate(blocks):
        answers: dict[str, Answer] = {}
        for template in ordered:
            recipe = recipe_for(template, block.digest, answers)
            assert recipe is not None
            answers[digest_json(template)] = commit(store, recipe, number * 10 + ordered.index(template))


def test_recipe_of_a_column_holds_the_contents_it_builds_on():
    answers = {TEXT_ID: answer_of("text"), TOKENS_ID: answer_of("tokens"), STUDENT_ID: answer_of("student")}
    assert recipe_for(TEXT_TEMPLATE, "b", {}) == text_recipe("b")
    assert recipe_for(TOKENS, "b", answers) == {**TOKENS, "text": "text"}
    assert recipe_for(SIGNAL, "b", answers) == {**SIGNAL, "tokens_content": "tokens"}
    assert recipe_for(ALIGNMENT, "b", answers) == {
        **ALIGNMENT, "teacher_content": "tokens", "student_content": "student"
    }  # fmt: skip


def test_recipe_of_equal_contents_is_shared_between_blocks():
    """The block itself is not in it: equal tokens are scored once."""
    answers = {TOKENS_ID: answer_of("tokens")}
    assert recipe_for(SIGNAL, "b", answers) == recipe_for(SIGNAL, "c", answers)


@pytest.mark.parametrize("template", TEMPLATES)
def test_recipe_is_none_while_an_input_is_missing(template):
    answers = {column: answer_of("x") for column in inputs_of(template).values()}
    assert recipe_for(template, "b", answers) is not None
    for column in answers:
        assert recipe_for(template, "b", {key: value for key, value in answers.items() if key != column}) is None


def test_inputs_of_an_unknown_kind_fails():
    with pytest.raises(AssertionError, match="vision"):
        inputs_of({"kind": "vision"})


def test_find_answers_in_any_order_of_templates(store):
    fill(store, TEMPLATES)
    found = find_answers(store, PLAN, TEMPLATES)
    assert [set(answers) for answers in found] == [{TEXT_ID, *map(digest_json, TEMPLATES)}] * 3
    assert list(find_answers(store, PLAN, TEMPLATES[::-1])) == list(found)


def test_find_answers_stops_where_an_input_is_missing(store):
    fill(store, [TOKENS, SIGNAL], BLOCKS[:1])
    commit(store, text_recipe(BLOCKS[1].digest), 99)
    found = find_answers(store, PLAN, TEMPLATES)
    assert [set(answers) for answers in found] == [{TEXT_ID, TOKENS_ID, digest_json(SIGNAL)}, {TEXT_ID}, set()]


def test_lacking_names_the_blocks_without_some_answer(store):
    fill(store, [TOKENS], BLOCKS[1:])
    found = find_answers(store, PLAN, [TOKENS, SIGNAL])
    assert found.lacking([TEXT_ID, TOKENS_ID]) == {0}
    assert found.lacking([TEXT_ID, digest_json(SIGNAL)]) == {0, 1, 2}
    assert found.lacking([]) == set()


# Answers that a version remembers


class Asked(Store):
    """Writes down which recipes were looked up, by kind."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.storage)
        self.kinds: list[str] = []

    def answer(self, recipe):
        self.kinds.append(recipe["kind"])
        return super().answer(recipe)


def publish(store: Store, plan: Plan = PLAN) -> Manifest:
    requested = {digest_json(template): (template, "label") for template in TEMPLATES}
    digest = store.put_plan(plan)
    return store.publish("d", lambda current: next_manifest(store, current, digest, requested)).manifest


def test_what_a_version_knows_is_not_asked_for(store):
    fill(store, TEMPLATES)
    known, asked = publish(store), Asked(store)
    assert list(find_answers(asked, PLAN, TEMPLATES, known)) == list(find_answers(store, PLAN, TEMPLATES))
    assert asked.kinds == []
    moved = Plan(PLAN.settings, [*BLOCKS[::-1], PlanBlock("9" * 64, "train", 1, 5, (1,), (0,))], ("a.jsonl",))
    assert list(find_answers(asked, moved, TEMPLATES, known)) == list(find_answers(store, moved, TEMPLATES))
    assert asked.kinds == ["text"]


def test_holes_of_a_version_are_asked_for(store):
    fill(store, TEMPLATES, BLOCKS[:2])
    known = publish(store)
    fill(store, TEMPLATES)
    asked = Asked(store)
    assert find_answers(asked, PLAN, TEMPLATES, known).lacking(map(digest_json, TEMPLATES)) == set()
    assert sorted(asked.kinds) == ["alignment", "signal", "text", "tokens", "tokens"]


def test_dropped_parts_are_asked_for_and_what_still_builds_on_them_is_not(store):
    fill(store, TEMPLATES)
    known, asked = publish(store), Asked(store)
    cell = known.column(TOKENS_ID).cells[1]
    mark_dropped(store.storage, cell.part)
    assert find_answers(asked, PLAN, TEMPLATES, known)[1][TOKENS_ID].part == cell.part
    assert asked.kinds == ["tokens"]
    store.storage.delete(recipe_path({**TOKENS, "text": known.column(TEXT_ID).cells[1].content}))
    asked.kinds.clear()
    found = find_answers(asked, PLAN, TEMPLATES, known)
    assert asked.kinds == ["tokens"]
    assert set(found[1]) == {TEXT_ID, STUDENT_ID}  # until the tokens are there, nobody knows what builds on them
    assert found.lacking([TOKENS_ID]) == found.lacking([digest_json(SIGNAL)]) == {1}


def test_what_builds_on_other_content_than_the_version_had_is_asked_for(store):
    fill(store, TEMPLATES)
    known, asked = publish(store), Asked(store)
    cell = known.column(TOKENS_ID).cells[1]
    recipe = {**TOKENS, "text": known.column(TEXT_ID).cells[1].content}
    mark_dropped(store.storage, cell.part)
    store.storage.delete(recipe_path(recipe))
    again = commit(store, recipe, 77)
    found = find_answers(asked, PLAN, TEMPLATES, known)
    assert found[1][TOKENS_ID] == again
    assert sorted(asked.kinds) == ["alignment", "signal", "tokens"]
    assert set(found[1]) == {TEXT_ID, TOKENS_ID, STUDENT_ID}


def test_next_manifest_lists_holes_and_orders_columns(store, plan_digest):
    fill(store, [TOKENS, SIGNAL], BLOCKS[:2])
    requested = {digest_json(template): (template, "label") for template in (SIGNAL, TOKENS)}
    manifest = next_manifest(store, None, plan_digest, requested)
    assert [column.kind for column in manifest.columns] == ["text", "tokens", "signal"]
    assert [column.num_holes for column in manifest.columns] == [1, 1, 1]
    assert manifest.plan == PLAN
    fill(store, [TOKENS, SIGNAL], BLOCKS[2:])
    again = next_manifest(store, manifest, plan_digest, {})
    assert [column.num_holes for column in again.columns] == [0, 0, 0]
    assert [column.label for column in again.columns] == ["text", "label", "label"]


def test_next_manifest_keeps_columns_that_nobody_asked_for(store, plan_digest):
    fill(store, TEMPLATES)
    first = next_manifest(store, None, plan_digest, {TOKENS_ID: (TOKENS, "a")})
    second = next_manifest(store, first, plan_digest, {STUDENT_ID: (STUDENT, "b")})
    third = next_manifest(store, None, plan_digest, {STUDENT_ID: (STUDENT, "b"), TOKENS_ID: (TOKENS, "a")})
    assert {column.id for column in second.columns} == {TEXT_ID, TOKENS_ID, STUDENT_ID}
    assert second == third


def test_next_manifest_takes_the_newest_label(store, plan_digest):
    fill(store, [TOKENS])
    first = next_manifest(store, None, plan_digest, {TOKENS_ID: (TOKENS, "old")})
    renamed = next_manifest(store, first, plan_digest, {TOKENS_ID: (TOKENS, "new")})
    assert [column.label for column in renamed.columns] == ["text", "new"]
    assert renamed.identity == first.identity
