"""A small store in which tokenizers disagree: two teachers of different tokenizers, and a student of a third.

Dataset ``mixed``: teachers ``a`` and ``b``, each with scalars and ``topk:6`` (temperatures 1 and 2), on the same
documents. One student has the tokenizer of ``a``, another has ``rough``, whose merges were learnt elsewhere, so that
spans between shared beginnings have several tokens on either side.

Dataset ``whole``: teacher ``a`` alone, with its whole distribution over its own tokens (``topk:400``), the same
projected to ``rough`` and to the tokenizer of ``b``, and scalars.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from builders import build_bytelevel_tokenizer, build_metaspace_tokenizer
from small_store import SEQUENCE_LENGTH, Silent, build_llama, corpus_rows, write_student_config

from logitstore.consumer.data import TrainingData
from logitstore.consumer.stream import Stream, StreamConfig
from logitstore.consumer.student import Student
from logitstore.corpus_files import list_files
from logitstore.hub import load_tokenizer
from logitstore.ingest import ingest
from logitstore.plan import PlanSettings
from logitstore.producer.request import ProduceConfig, TeacherRequest
from logitstore.producer.run import produce
from logitstore.store import Store
from logitstore.tokenizer import Tokenizer

STEP_NATS = 0.02


@dataclass(frozen=True)
class CrossStore:
    """Where everything is.

    Attributes:
        url: of the store.
        tokenizers: folders by name: ``a``, ``b`` and ``rough``.
    """

    url: str
    tokenizers: dict[str, str]

    @property
    def store(self) -> Store:
        return Store.open(self.url)

    def student(self, folder: Path, tokenizer: str) -> Student:
        """Of random weights; its head is wider than its tokenizer."""
        home = Path(self.tokenizers[tokenizer])
        config = write_student_config(folder / "student.json", vocab_size=440)
        return Student.initialise(config, Tokenizer.from_folder(home), home, seed=0)

    def stream(
        self,
        tokenizer: str,
        *,
        dataset: str = "mixed",
        temperature: float = 1.0,
        sequences: int = 3,
        teacher_weights: dict[str, float] | None = None,
        selection: str | None = None,
        projected: bool | None = None,
    ) -> Stream:
        data = TrainingData.open(
            self.store,
            self.store.dataset(dataset),
            Tokenizer.from_folder(self.tokenizers[tokenizer]),
            teacher_weights=teacher_weights,
            selection=selection,
            projected=projected,
        )
        length = SEQUENCE_LENGTH
        return Stream(data, StreamConfig(sequence_length=length, batch_tokens=length * sequences, seed=0), temperature)


def build_cross_store(folder: Path) -> CrossStore:
    rows = corpus_rows()[8::3]
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [json.dumps(row) for row in rows]
    tokenizers = {
        "a": build_bytelevel_tokenizer(folder / "a", 340, [_words(text, 0, 3) for text in texts]),
        "b": build_metaspace_tokenizer(folder / "b", 420, texts),
        # One learns how words begin and the other how they end, so each cuts inside the other's tokens.
        "rough": build_bytelevel_tokenizer(folder / "rough", 400, [_words(text, 2, 99) for text in texts]),
    }
    teachers = {
        "a": build_llama(folder / "teacher_a", tokenizers["a"], vocab_size=352, hidden_size=24, seed=1),
        "b": build_llama(folder / "teacher_b", tokenizers["b"], vocab_size=432, hidden_size=16, seed=2),
    }
    url = str(folder / "store")
    store = Store.open_or_create(url)
    settings = PlanSettings.for_corpus(corpus.stat().st_size, held_out=0.15, block_bytes=1024)
    plan = ingest(store, list_files([str(corpus)]), settings).plan_digest

    def run(dataset: str, names: str, students: list[str], **options: object) -> None:
        config = ProduceConfig(device="cpu", threads=1, max_length=256, **options)  # type: ignore[arg-type]
        requests = [TeacherRequest.parse(f"{name}={teachers[name]}", config) for name in names]
        chosen = [(name, load_tokenizer(tokenizers[name])) for name in students]
        produce(store, dataset, plan, requests, chosen, config, Silent())

    run("mixed", "ab", ["a", "rough"], select="topk:6", temperatures=(1.0, 2.0))
    signals = ("scalars", "sparse", "sparse@rough", "sparse@b")
    run("whole", "a", ["rough", "b"], select="topk:400", logprob_step=STEP_NATS, signals=signals)
    return CrossStore(url, tokenizers)


def _words(text: str, begin: int, end: int) -> str:
    """A text of which each word is cut to some of its letters."""
    return " ".join(word[begin:end] for word in text.split())
