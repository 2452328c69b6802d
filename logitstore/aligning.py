"""Adding a student's tokens, and their alignment with every teacher's, to a dataset that is there already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from logitstore import freeing
from logitstore.columns import next_manifest
from logitstore.errors import StoreError
from logitstore.heartbeats import alive
from logitstore.inspection import describe_alignment, stored_tokenizer
from logitstore.manifest import Manifest
from logitstore.store import DatasetVersion, Store
from logitstore.text_columns import TextColumns
from logitstore.tokenizer import Tokenizer

_THREADS = 2
"""Blocks in hand at a time: while one is cut, another is read, aligned and stored."""


class AlignProgress(Protocol):
    """Who wants to know how far it is."""

    def begin(self, num_blocks: int, num_bytes: int) -> None: ...
    def finish_block(self, num_bytes: int) -> None: ...


@dataclass(frozen=True)
class AlignReport:
    """What was done.

    Attributes:
        num_filled_blocks: blocks in which something was missing.
        alignments: of the students, JSON-able, as in ``inspection.describe_dataset``.
        same_tokens: (teacher, student) labels of pairs whose tokens are the same ones, and need no alignment.
    """

    dataset: DatasetVersion
    num_filled_blocks: int
    alignments: tuple[dict[str, Any], ...]
    same_tokens: tuple[tuple[str, str], ...]


def align_dataset(
    store: Store, name: str, students: Sequence[tuple[str, Tokenizer]], progress: AlignProgress
) -> AlignReport:
    """Answer what is missing and publish the next version, if it says anything new.

    Any number of processes may do the same at once, or be killed: each block is answered once.

    Args:
        store: the store.
        name: of the dataset; blocks of its newest version are aligned.
        students: (label, tokenizer).
        progress: told of every block.

    Raises:
        StoreError: no such dataset, or no teacher has said anything of it.
        TokenizerError: a student has no chat template, or one that changes the chats.
    """
    plan_digest = store.dataset(name).manifest.plan_digest

    def work() -> AlignReport:
        return _align(store, name, students, progress)

    with alive(store.storage, plan_digest):
        return freeing.tried_again(work)


def _align(store: Store, name: str, students: Sequence[tuple[str, Tokenizer]], progress: AlignProgress) -> AlignReport:
    known = store.dataset(name).manifest
    texts = TextColumns(store, known.plan, known)
    pairs = _add_columns(texts, store, known, name, students)
    missing, num_bytes = texts.missing(), known.plan.blocks.num_bytes
    progress.begin(len(missing), int(num_bytes[list(missing)].sum()))
    for number in texts.filling(missing, num_threads=_THREADS):
        progress.finish_block(int(num_bytes[number]))

    def change(current: Manifest | None) -> Manifest:
        # The plan is another's to say: blocks that are new by now are holes until the next run.
        return next_manifest(store, current, current.plan_digest if current else known.plan_digest, texts.requested)

    version = store.publish(name, change)
    columns = (version.manifest.column(column) for column in texts.requested)
    return AlignReport(
        version,
        len(missing),
        tuple(
            describe_alignment(version.manifest, column) for column in columns if column and column.kind == "alignment"
        ),
        tuple((teacher, student) for teacher, student, same in pairs if same),
    )


def _add_columns(
    texts: TextColumns, store: Store, known: Manifest, name: str, students: Sequence[tuple[str, Tokenizer]]
) -> list[tuple[str, str, bool]]:
    """Ask for all columns; returns (teacher, student, whether they have the same tokens)."""
    teachers = list(dict.fromkeys((column.label, column.template["tokens"]) for column in known.find("signal")))
    if not teachers:
        raise StoreError(
            f"dataset {name!r}: no teacher's signal to align with; make one with `logitstore produce STORE --dataset "
            f"{name} --teacher MODEL`"
        )
    for tokens in dict.fromkeys(tokens for _, tokens in teachers):
        restored = texts.add_tokens(stored_tokenizer(store, known, tokens), "")
        assert restored == tokens, "a tokenizer out of the store makes the tokens that it was stored for"
    pairs = []
    for label, tokenizer in students:
        student = texts.add_tokens(tokenizer, label)
        for teacher, tokens in teachers:
            texts.add_alignment(tokens, student, f"{teacher} -> {label}")
            pairs.append((teacher, label, tokens == student))
    # What is there keeps its name, lest a new name make a new version.
    texts.requested |= {
        column.id: (column.template, column.label) for column in known.columns if column.id in texts.requested
    }
    return pairs
