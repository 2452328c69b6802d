"""Columns that need no model: tokens of every tokenizer, and alignments between them."""

from __future__ import annotations

import platform
import threading
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
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
from logitstore.storage import map_threads
from logitstore.store import Store
from logitstore.text_parts import read_documents_of, text_recipe
from logitstore.token_parts import TokenBlock, read_tokens, stage_tokens, tokens_template
from logitstore.tokenizer import Tokenizer

_LOCKS = 64


class TextColumns:
    """The tokens and alignment columns that a run asks for, and their answers, block by block.

    Answers may be asked for while another thread fills the columns.
    """

    def __init__(self, store: Store, plan: Plan, current: Manifest | None = None) -> None:
        """Args: ``current`` is the newest version of the dataset, whose answers need not be looked for."""
        self._store, self._plan, self._current = store, plan, current
        self._tokenizers: dict[str, Tokenizer] = {}
        self._being_cut = [threading.Lock() for _ in range(_LOCKS)]
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

    def missing(self) -> set[int]:
        """Blocks where some answer is missing."""
        templates = [template for template, _ in self.requested.values()]
        return find_answers(self._store, self._plan, templates, self._current).lacking(self.requested)

    def fill(self) -> None:
        """Answer whatever is missing."""
        for _ in self.filling(self.missing()):
            pass

    def filling(
        self, blocks: Collection[int], columns: Collection[str] | None = None, num_threads: int = 1
    ) -> Iterator[int]:
        """Answer what is missing of these columns (all by default), and yield each block that is done.

        Args:
            blocks: which, by number.
            columns: ids.
            num_threads: blocks in hand at a time. Tokenizers use all cores in any case; encoding and storing does not.
        """
        wanted = [column for column in self.requested if columns is None or column in columns]

        def fill(number: int) -> int:
            self._fill_block(self._plan.blocks.digests[number], wanted)
            return number

        ordered = (number for number in walk(self._plan) if number in blocks)
        return map(fill, ordered) if num_threads == 1 else map_threads(fill, ordered, num_threads, ahead=num_threads)

    def tokens(self, column: str, block: str) -> Answer:
        """The answer of a tokens column for any block whose text is stored, made if need be."""
        return self._answer_tokens(column, _Block(self._store, block))

    def _fill_block(self, digest: str, columns: Iterable[str]) -> None:
        block = _Block(self._store, digest)
        for column in columns:
            if self.requested[column][0]["kind"] == "tokens":
                block.answers[column] = self._answer_tokens(column, block)
            else:
                self._answer_alignment(column, block)

    def _answer_tokens(self, column: str, block: _Block) -> Answer:
        recipe = recipe_for(self.requested[column][0], block.digest, block.answers)
        assert recipe is not None, "tokens build on the text alone"
        answer = self._store.answer(recipe)
        if answer is not None:
            return answer
        # Whoever comes second waits for the first, and has the answer.
        with self._being_cut[hash((column, block.digest)) % len(self._being_cut)]:
            return self._store.answer(recipe) or self._commit_tokens(recipe, column, block)

    def _answer_alignment(self, column: str, block: _Block) -> None:
        template, _ = self.requested[column]
        recipe = recipe_for(template, block.digest, block.answers)
        assert recipe is not None, "tokens are asked for before the alignments that build on them"
        if self._store.answer(recipe) is not None:
            return
        sides = [template[side] for side in ("teacher_tokens", "student_tokens")]
        teacher, student = (block.tokens(side) for side in sides)
        alignment = align_blocks(teacher, student, *(self._tokenizers[side] for side in sides))
        stats = {"num_rows": student.num_tokens, **vars(alignment.statistics)}
        self._store.commit_part(recipe, stage_alignment(alignment), stats, _provenance())

    def _commit_tokens(self, recipe: Recipe, column: str, block: _Block) -> Answer:
        tokenized = self._tokenizers[column].tokenize(block.documents)
        stats = {
            "num_rows": sum(len(document.ids) for document in tokenized),
            "num_documents": len(tokenized),
            "num_exact_documents": sum(document.exact for document in tokenized),
        }
        return self._store.commit_part(recipe, stage_tokens(tokenized), stats, _provenance())


class _Block:
    """A block in hand: what was read of it once need not be read again.

    Attributes:
        answers: by column id, what is known of it.
    """

    def __init__(self, store: Store, digest: str) -> None:
        text = store.answer(text_recipe(digest))
        if text is None:
            raise StoreError(f"block {digest[:16]}: its text is not in the store; name the corpus again with --data")
        self._store, self.digest = store, digest
        self.answers = {TEXT_ID: text}
        self._tokens: dict[str, TokenBlock] = {}

    @cached_property
    def documents(self) -> list[Document]:
        return read_documents_of(self._store.part(self.answers[TEXT_ID].part))

    def tokens(self, column: str) -> TokenBlock:
        """Of a tokens column whose answer is known."""
        if column not in self._tokens:
            self._tokens[column] = read_tokens(self._store.part(self.answers[column].part))
        return self._tokens[column]


def walk(plan: Plan) -> Iterator[int]:
    """All blocks of a plan, from a place of this process's own: workers meet only when little is left."""
    num_blocks = len(plan.blocks)
    begin = int(WRITER[:8], 16) % num_blocks
    for step in range(num_blocks):
        yield (begin + step) % num_blocks


def _provenance() -> dict[str, Any]:
    """Who made a part, for people; no recipe depends on it."""
    return {"device": platform.machine(), **{name: version(name) for name in ("logitstore", "tokenizers", "zarr")}}
