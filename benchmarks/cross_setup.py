"""What the study of cross-tokenizer objectives trains on: text, two tokenizers, two teachers, and what they said.

Both teachers are the same architecture, trained on the same documents; one has the student's tokenizer, the other
another. So "the same tokenizer" and "another tokenizer" are compared on one student, from the same weights, on the same
tokens in the same order; a student of the other tokenizer would be another student. The teacher of the coarser
tokenizer learns more from as many bytes, so it sees as many fewer as make the two teachers about as good.

Everything is made once and left in the folder: a step whose result is there is not done again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import logitstore, logitstore_json
from demo_corpus import documents
from demo_tokenizers import train_bytelevel_tokenizer, train_metaspace_tokenizer
from small_models import save_initial_model

DATASET = "study"
SEQUENCE = 256
SAME, OTHER = "same", "other"
"""The teachers: of the student's tokenizer, and of another one."""
SELECTIONS = {SAME: ("threshold:12",), OTHER: ("threshold:12", "topk:64")}
"""What is stored of each."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How big the study is."""

    num_documents: int | None = None
    """Of the corpus; all by default."""
    student_vocabulary: int = 2048
    teacher_vocabulary: int = 3072
    student_width: int = 64
    teacher_width: int = 160
    teacher_tokens: int = 1_400_000
    """That the teacher of the student's tokenizer is trained on."""
    other_bytes: float = 0.87
    """Bytes that the other teacher sees, as a share of that one's. At 1 it was better by 0.024 bits per byte."""
    teacher_batch: int = 2048
    teacher_lr: float = 5e-3
    student_steps: int = 250
    student_batch: int = 1024
    student_lr: float = 1.6e-2
    num_seeds: int = 5


@dataclass(frozen=True)
class Study:
    """The folder of a study."""

    build: Path
    sizes: Sizes

    @property
    def store(self) -> str:
        return str(self.build / "store")

    def path(self, name: str) -> Path:
        return self.build / name

    def once(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The JSON of a step, made now unless it is there."""
        file = self.build / "steps" / f"{name}.json"
        if not file.exists():
            made = make()
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(made, indent=1))
            partial.rename(file)
        return json.loads(file.read_text())


def prepare_text(study: Study) -> None:
    """Plan of the corpus, both tokenizers, and the models to begin from."""
    study.once("text", lambda: _make_text(study))


def prepare_teacher(study: Study, name: str) -> dict[str, Any]:
    """Train a teacher and keep what it says; returns its held-out measures."""
    trained = study.once(f"train-{name}", lambda: _train_teacher(study, name))
    for selection in SELECTIONS[name]:
        study.once(f"produce-{name}-{selection.split(':')[0]}", lambda select=selection: _produce(study, name, select))
    return trained["held_out"]


def _make_text(study: Study) -> dict[str, Any]:
    import logitstore as library

    study.build.mkdir(parents=True, exist_ok=True)
    corpus = study.path("corpus.jsonl")
    with corpus.open("w") as file:
        for row in list(documents())[: study.sizes.num_documents]:
            file.write(json.dumps(row) + "\n")
    logitstore("plan", study.store, "--data", str(corpus), "--dataset", DATASET)
    texts = list(_training_texts(study))
    train_metaspace_tokenizer(study.path("student-tokenizer"), texts, study.sizes.student_vocabulary)
    train_bytelevel_tokenizer(study.path("teacher-tokenizer"), texts, study.sizes.teacher_vocabulary)
    _cut(study)
    sizes = study.sizes
    for name, tokenizer in ((SAME, "student-tokenizer"), (OTHER, "teacher-tokenizer")):
        _initialise(study, f"{name}-init", tokenizer, 0, sizes.teacher_width, 4)
    return {"num_documents": len(texts), "version": library.open(study.store).dataset(DATASET).number}


def initial_student(study: Study, seed: int) -> Path:
    """Folder of the model that the students of a seed begin from; made unless it is there."""
    name = f"student-init-{seed}"

    def make() -> dict[str, Any]:
        _initialise(study, name, "student-tokenizer", seed, study.sizes.student_width, 2)
        return {}

    study.once(name, make)
    return study.path(name)


def _initialise(study: Study, name: str, tokenizer: str, seed: int, width: int, num_layers: int) -> None:
    sizes = {"hidden_size": width, "intermediate_size": width * 8 // 3 // 4 * 4, "num_hidden_layers": num_layers}
    save_initial_model(study.path(name), study.path(tokenizer), seed, **sizes)


def _training_texts(study: Study) -> Iterator[str]:
    import logitstore as library
    from logitstore.plan import TRAIN
    from logitstore.text_parts import read_documents_of

    store = library.open(study.store)
    manifest = store.dataset(DATASET).manifest
    column = next(manifest.find("text"))
    for number, block in enumerate(manifest.plan.blocks):
        if block.split == TRAIN:
            yield from (d.text for d in read_documents_of(store.column_part(column, number)))


def _cut(study: Study) -> None:
    """Add both tokenizers' tokens, and their alignment, to the dataset."""
    import logitstore as library
    from logitstore.columns import next_manifest
    from logitstore.text_columns import TextColumns
    from logitstore.tokenizer import Tokenizer

    store = library.open(study.store)
    manifest = store.dataset(DATASET).manifest
    columns = TextColumns(store, manifest.plan)
    student, teacher = (
        columns.add_tokens(Tokenizer.from_folder(str(study.path(f"{name}-tokenizer"))), name)
        for name in ("student", "teacher")
    )
    columns.add_alignment(teacher, student, f"{OTHER} -> student")
    columns.fill()
    store.publish(DATASET, lambda current: next_manifest(store, current, manifest.plan_digest, columns.requested))


def tokens_per_byte(study: Study) -> dict[str, float]:
    """Of each tokenizer, ``student`` and ``teacher``, on the corpus."""
    import logitstore as library
    from logitstore.tokenizer import Tokenizer

    manifest = library.open(study.store).dataset(DATASET).manifest
    num_bytes = int(manifest.plan.blocks.num_bytes.sum())
    rates = {}
    for name in ("student", "teacher"):
        tokenizer = Tokenizer.from_folder(str(study.path(f"{name}-tokenizer")))
        column = next(manifest.find("tokens", tokenizer=tokenizer.fingerprint))
        rates[name] = column.stats["num_rows"] / num_bytes
    return rates


def _train_teacher(study: Study, name: str) -> dict[str, Any]:
    # The one without signals: the other teacher's may come in while this one is in training.
    sizes, version = study.sizes, study.once("text", dict)["version"]
    rates = tokens_per_byte(study)
    ratio = sizes.other_bytes * rates["teacher"] / rates["student"] if name == OTHER else 1.0
    steps = round(sizes.teacher_tokens * ratio / sizes.teacher_batch)
    return logitstore_json(
        "train", study.store, "--dataset", DATASET, "--dataset-version", str(version),
        "--output", str(study.path(name)), "--student", str(study.path(f"{name}-init")), "--objective", "ce",
        "--lr", str(sizes.teacher_lr), "--max-steps", str(steps), "--warmup-steps", "20",
        "--batch-tokens", str(sizes.teacher_batch), "--seq-length", str(SEQUENCE), "--threads", "1",
        "--log-every", "50", "--save-every", "100000",
    )  # fmt: skip


def _produce(study: Study, name: str, selection: str) -> dict[str, Any]:
    return logitstore_json(
        "produce", study.store, "--dataset", DATASET, "--teacher", f"{name}={study.path(name)}",
        "--student-tokenizer", str(study.path("student-tokenizer")), "--select", selection,
        "--max-length", str(2 * SEQUENCE), "--threads", "1",
    )  # fmt: skip
