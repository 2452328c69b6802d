"""Columns that need no model: tokens of every tokenizer, and alignments between them."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from logitstore.alignment_parts import align_blocks, alignment_template, stage_alignment
from logitstore.columns import TEXT_ID, Template, find_answers, recipe_for
from logitstore.digests import digest_json
from logitstore.documents import Document
from logitstore.errors import StoreError
from logitstore.manifest import Manifest
from logitstore.plan import Plan
from logitstore.recipes import WRITER, Answer, Recipe
from logitstore.store import Store
from logitstore.text_parts import read_documents_of, text_recipe
from logitstore.token_parts import read_tokens, stage_tokens, tokens_template
from logitstore.tokenizer import Tokenizer


class TextColumns:
    """The tokens and alignment columns that a run asks for, and their answers, block by block."""

    def __init__(self, store: Store, plan: Plan, current: Manifest | None = None) -> None:
        """Args: ``current`` is the newest version of the dataset, whose answers need not be looked for."""
        self._store, self._plan, self._current = store, plan, current
        self._tokenizers: dict[str, Tokenizer] = {}
        self.requested: dict[str, tuple[Template, str]] = {}
        """By column id, (template, label)."""

    def add_tokens(self, tokenizer: Tokenizer, label: str) -> str:
        """Ask for a tokens column; returns its id. The tokenizer itself is kept as an asset."""
        template = tokens_template(tokenizer, has_chats=self._plan.has_chats)
        column = digest_json(template)
        if column not in self.requested:
            self._store.put_asset(tokenizer.asset())
            chat_template = tokenizer.template_asset()
            if chat_template is not None and self._plan.has_chats:
                self._store.put_asset(chat_template)
            self.requested[column] = (template, label)
            self._tokenizers[column] = tokenizer
        return column

    def add_alignment(self, teacher: str, student: str, label: str) -> None:
        """Ask for the alignment of two tokens columns; none is needed between a column and itself."""
        if teacher != student:
            template = alignment_template(teacher, student)
            self.requested[digest_json(template)] = (template, label)

    def fill(self) -> None:
        """Answer whatever is missing."""
        templates = [template for template, _ in self.requested.values()]
        missing = find_answers(self._store, self._plan, templates, self._current).lacking(self.requested)
        for number in walk(self._plan):
            if number in missing:
                self._fill_block(self._plan.blocks.digests[number])

    def tokens(self, column: str, block: str) -> Answer:
        """The answer of a tokens column for any block whose text is stored, made if need be."""
        text = self._text(block)
        recipe = recipe_for(self.requested[column][0], block, {TEXT_ID: text})
        assert recipe is not None, "tokens build on the text alone"
        answer = self._store.answer(recipe)
        return answer or self._commit_tokens(recipe, column, read_documents_of(self._store.part(text.part)))

    def _fill_block(self, block: str) -> None:
        answers = {TEXT_ID: self._text(block)}
        documents: Sequence[Document] = ()
        for column, (template, _) in self.requested.items():
            recipe = recipe_for(template, block, answers)
            assert recipe is not None, "tokens are asked for before the alignments that build on them"
            answer = self._store.answer(recipe)
            if answer is None and template["kind"] == "tokens":
                documents = documents or read_documents_of(self._store.part(answers[TEXT_ID].part))
                answer = self._commit_tokens(recipe, column, documents)
            elif answer is None:
                answer = self._commit_alignment(recipe, template, answers)
            answers[column] = answer

    def _text(self, block: str) -> Answer:
        answer = self._store.answer(text_recipe(block))
        if answer is None:
            raise StoreError(f"block {block[:16]}: its text is not in the store; name the corpus again with --data")
        return answer

    def _commit_tokens(self, recipe: Recipe, column: str, documents: Sequence[Document]) -> Answer:
        tokenized = self._tokenizers[column].tokenize(documents)
        stats = {
            "num_rows": sum(len(document.ids) for document in tokenized),
            "num_documents": len(documents),
            "num_exact_documents": sum(document.exact for document in tokenized),
        }
        return self._store.commit_part(recipe, stage_tokens(tokenized), stats, _provenance())

    def _commit_alignment(self, recipe: Recipe, template: Template, answers: Mapping[str, Answer]) -> Answer:
        teacher, student = (
            read_tokens(self._store.part(answers[template[side]].part)) for side in ("teacher_tokens", "student_tokens")
        )
        alignment = align_blocks(teacher, student)
        stats = {"num_rows": student.num_tokens, **vars(alignment.statistics)}
        return self._store.commit_part(recipe, stage_alignment(alignment), stats, _provenance())


def walk(plan: Plan) -> Iterator[int]:
    """All blocks of a plan, from a place of this process's own: workers meet only when little is left."""
    num_blocks = len(plan.blocks)
    begin = int(WRITER[:8], 16) % num_blocks
    for step in range(num_blocks):
        yield (begin + step) % num_blocks


def _provenance() -> dict[str, Any]:
    """Who made a part, for people; no recipe depends on it."""
    return {"device": platform.machine(), **{name: version(name) for name in ("logitstore", "tokenizers", "zarr")}}
