"""What it takes to add a student's tokens and their alignment to a dataset, next to cutting the text alone."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from alignment_tokenizers import BenchTokenizer
from commands import logitstore

import logitstore as library
from logitstore.columns import next_manifest
from logitstore.manifest import Manifest
from logitstore.store import Store
from logitstore.text_columns import TextColumns
from logitstore.tokenizer_assets import decode_tokenizer

_DATASET = "corpus"
_REPEATS = 3


@dataclass(frozen=True)
class EndToEnd:
    """Seconds of the processor, of as many bytes of text."""

    num_bytes: int
    alone: float
    """The tokenizers library's own batch encoding."""
    stored: float
    """Text from a store; tokens, proof of their bytes, alignment, and a new version of the dataset into it."""

    @property
    def share(self) -> float:
        """Of the speed of the tokenizer alone."""
        return self.alone / self.stored


def measure_end_to_end(
    teacher: BenchTokenizer, student: BenchTokenizer, texts: Sequence[str], folder: Path
) -> EndToEnd:
    """Fastest of several, each into a store that has the text and the teacher's tokens.

    Args:
        teacher: whose tokens are there already.
        student: whose tokens are to be.
        texts: documents.
        folder: for the stores, emptied.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    alone = tokenizers.Tokenizer.from_str(json.dumps(decode_tokenizer(student.ours.asset())))
    alone_seconds, stored_seconds = [], []
    for number in range(_REPEATS):
        store = _store_with_teacher(folder / str(number), corpus, teacher)
        began = time.process_time()
        alone.encode_batch_fast(list(texts), add_special_tokens=False)
        alone_seconds.append(time.process_time() - began)
        began = time.process_time()
        _add_student(store, teacher, student)
        stored_seconds.append(time.process_time() - began)
    return EndToEnd(sum(len(text.encode()) for text in texts), min(alone_seconds), min(stored_seconds))


def _store_with_teacher(folder: Path, corpus: Path, teacher: BenchTokenizer) -> Store:
    logitstore("plan", str(folder), "--data", str(corpus), "--dataset", _DATASET)
    store = library.open(str(folder))
    manifest = store.dataset(_DATASET).manifest
    columns = TextColumns(store, manifest.plan, manifest)
    columns.add_tokens(teacher.ours, "teacher")
    _publish(store, columns, manifest)
    return store


def _add_student(store: Store, teacher: BenchTokenizer, student: BenchTokenizer) -> None:
    manifest = store.dataset(_DATASET).manifest
    columns = TextColumns(store, manifest.plan, manifest)
    sides = columns.add_tokens(teacher.ours, "teacher"), columns.add_tokens(student.ours, "student")
    columns.add_alignment(*sides, "teacher -> student")
    _publish(store, columns, manifest)


def _publish(store: Store, columns: TextColumns, manifest: Manifest) -> None:
    columns.fill()
    store.publish(_DATASET, lambda current: next_manifest(store, current, manifest.plan_digest, columns.requested))
