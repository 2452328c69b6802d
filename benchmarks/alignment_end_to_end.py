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
_BLOCK_BYTES = 4 << 20
"""Of the text of a block, as in a large dataset: a block costs something of its own."""
_REPEATS = 2


@dataclass(frozen=True)
class EndToEnd:
    """Seconds of the processor, for as many bytes of text; the fastest of several."""

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
    teacher: BenchTokenizer, students: Sequence[BenchTokenizer], texts: Sequence[str], folder: Path
) -> dict[str, EndToEnd]:
    """By name of the student, each added to a store that has the text and the teacher's tokens.

    Args:
        teacher: whose tokens are there already.
        students: whose tokens are to be.
        texts: documents.
        folder: for the stores, emptied.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    num_bytes = sum(len(text.encode()) for text in texts)
    found: dict[str, EndToEnd] = {}
    for number in range(_REPEATS):
        store = _store_with_teacher(folder / str(number), corpus, teacher)
        for student in students:
            alone, stored = _seconds_alone(student, texts), _seconds_stored(store, teacher, student)
            before = found.get(student.name, EndToEnd(num_bytes, alone, stored))
            found[student.name] = EndToEnd(num_bytes, min(before.alone, alone), min(before.stored, stored))
    return found


def _seconds_alone(student: BenchTokenizer, texts: Sequence[str]) -> float:
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(decode_tokenizer(student.ours.asset())))
    began = time.process_time()
    tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return time.process_time() - began


def _seconds_stored(store: Store, teacher: BenchTokenizer, student: BenchTokenizer) -> float:
    began = time.process_time()
    manifest = store.dataset(_DATASET).manifest
    columns = TextColumns(store, manifest.plan, manifest)
    sides = columns.add_tokens(teacher.ours, teacher.name), columns.add_tokens(student.ours, student.name)
    columns.add_alignment(*sides, f"{teacher.name} -> {student.name}")
    _publish(store, columns, manifest)
    return time.process_time() - began


def _store_with_teacher(folder: Path, corpus: Path, teacher: BenchTokenizer) -> Store:
    logitstore("plan", str(folder), "--data", str(corpus), "--dataset", _DATASET, "--block-bytes", str(_BLOCK_BYTES))
    store = library.open(str(folder))
    manifest = store.dataset(_DATASET).manifest
    columns = TextColumns(store, manifest.plan, manifest)
    columns.add_tokens(teacher.ours, teacher.name)
    _publish(store, columns, manifest)
    return store


def _publish(store: Store, columns: TextColumns, manifest: Manifest) -> None:
    columns.fill()
    store.publish(_DATASET, lambda current: next_manifest(store, current, manifest.plan_digest, columns.requested))
