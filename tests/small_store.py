"""One small store for all tests of the consumer and the command line, produced once a session by the real producer.

Dataset ``mixed``: texts, prompts with completions and chats; teachers ``big`` and ``small`` of one tokenizer, each with
scalars, ``topk:6`` (temperatures 1 and 2) and ``threshold:0.03``; aligned with the tokenizer ``other``. The teachers'
weights are random but large, so that what they say differs from place to place; their heads are wider than their
tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from builders import build_bytelevel_tokenizer, build_metaspace_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from logitstore.consumer.data import TrainingData
from logitstore.consumer.stream import Stream, StreamConfig
from logitstore.consumer.student import Student
from logitstore.corpus_files import list_files
from logitstore.hub import load_tokenizer
from logitstore.ingest import ingest
from logitstore.plan import PlanSettings
from logitstore.producer.request import ProduceConfig, TeacherRequest
from logitstore.producer.run import produce
from logitstore.store import DatasetVersion, Store
from logitstore.tokenizer import Tokenizer

SEQUENCE_LENGTH = 64
THETA = 0.03

_WORDS = (
    *("return", "the", "list", "of", "lines", "in", "string,", "breaking", "at", "line", "boundaries;"),
    *("keep", "ends", "unless", "asked.", "Each", "part", "is", "one", "word", "def"),
)


@dataclass(frozen=True)
class SmallStore:
    """Where everything is.

    Attributes:
        url: of the store.
        corpus: the JSONL file that it was made from.
        teachers: model folders by name, ``big`` and ``small``.
        tokenizer: the teachers' tokenizer folder.
        other: folder of the tokenizer that they are aligned with.
        stranger: folder of one that the dataset does not know.
    """

    url: str
    corpus: Path
    teachers: dict[str, str]
    tokenizer: str
    other: str
    stranger: str

    @property
    def store(self) -> Store:
        return Store.open(self.url)

    @property
    def version(self) -> DatasetVersion:
        return self.store.dataset("mixed")


class Silent:
    """Progress that nobody watches."""

    def begin(self, *_: object) -> None: ...
    def advance(self, *_: object) -> None: ...
    def finish_block(self, *_: object) -> None: ...


def build_small_store(folder: Path) -> SmallStore:
    disable_progress_bar()
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in corpus_rows()))
    texts = [json.dumps(row) for row in corpus_rows()]
    tokenizer = build_bytelevel_tokenizer(folder / "tokenizer", 340, texts)
    teachers = {
        name: build_llama(folder / name, tokenizer, vocab_size=352, hidden_size=size, seed=size)
        for name, size in (("big", 24), ("small", 16))
    }
    other = build_metaspace_tokenizer(folder / "other", 420, texts)
    stranger = build_bytelevel_tokenizer(folder / "stranger", 300, texts)
    url = str(folder / "store")
    store = Store.open_or_create(url)
    settings = PlanSettings.for_corpus(corpus.stat().st_size, held_out=0.15, block_bytes=2048)
    plan = ingest(store, list_files([str(corpus)]), settings).plan_digest
    for select, temperatures in (("topk:6", (1.0, 2.0)), (f"threshold:{THETA}", (1.0,))):
        config = ProduceConfig(select=select, temperatures=temperatures, device="cpu", threads=1, max_length=256)
        requests = [TeacherRequest.parse(f"{name}={path}", config) for name, path in teachers.items()]
        students = [("other", load_tokenizer(other))]
        produce(store, "mixed", plan, requests, students, config, Silent())
    return SmallStore(url, corpus, teachers, tokenizer, other, stranger)


def corpus_rows() -> list[dict[str, object]]:
    """Documents of all three kinds, from one character to several sequences."""
    rows: list[dict[str, object]] = [{"text": text} for text in _texts()]
    for number in range(12):
        a, b = number * 7 + 3, number * 11 + 2
        rows.append({"prompt": f"What is {a} + {b}? ", "completion": f"It is {a + b}, naïve as it may sound."})
        rows.append({"messages": _chat(number)})
    return rows


def _texts() -> Iterable[str]:
    yield "x"
    for number in range(24):
        words = [f"{_WORDS[(number * 5 + k * k) % len(_WORDS)]}{k % 10}" for k in range(3 + number * 3)]
        yield f"Note {number}. " + " ".join(words) + ("\n" if number % 2 else " 你好 🎉.")
    yield "A long one: " + " ".join(_WORDS[k * k % len(_WORDS)] for k in range(150))


def _chat(number: int) -> list[dict[str, str]]:
    turns = [{"role": "system", "content": "Be brief."}] if number % 2 else []
    for turn in range(1 + number % 2):
        turns.append({"role": "user", "content": f"Say {_WORDS[number]} {turn} times."})
        turns.append({"role": "assistant", "content": " ".join([_WORDS[number]] * turn) or "No."})
    return turns


def build_llama(
    folder: Path, tokenizer: str, *, vocab_size: int, hidden_size: int = 16, seed: int = 0, **options: Any
) -> str:
    """A Llama of random weights with a tokenizer, as ``save_pretrained`` writes it; returns its folder."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**llama_config(vocab_size, hidden_size, **options)))
    model.save_pretrained(folder)
    for file in Path(tokenizer).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


def llama_config(vocab_size: int, hidden_size: int = 16, **options: Any) -> dict[str, Any]:
    """Values of a ``config.json``."""
    values: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "initializer_range": 0.4,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return values | options


def write_student_config(path: Path, vocab_size: int = 352, **options: Any) -> str:
    """A ``config.json`` of a small student; returns its path."""
    path.write_text(json.dumps({**llama_config(vocab_size), "initializer_range": 0.2, **options}))
    return str(path)


def make_student(small: SmallStore, folder: Path, tokenizer: str = "tokenizer", **options: Any) -> Student:
    """A small student of random weights, with the teachers' tokenizer or ``other``; its head is wider than that."""
    home = Path(getattr(small, tokenizer))
    options = {"vocab_size": 352 if tokenizer == "tokenizer" else 440, **options}
    config = write_student_config(folder / "student.json", **options)
    return Student.initialise(config, Tokenizer.from_folder(home), home, seed=0)


def open_stream(
    small: SmallStore,
    tokenizer: str = "tokenizer",
    *,
    selection: str = "topk",
    temperature: float = 1.0,
    loss_on: str = "all",
    length: int = SEQUENCE_LENGTH,
    sequences: int = 4,
    seed: int = 0,
    teacher_weights: dict[str, float] | None = None,
) -> Stream:
    """Batches for a student with the teachers' tokenizer or ``other``."""
    student = Tokenizer.from_folder(getattr(small, tokenizer))
    data = TrainingData.open(
        small.store, small.version, student, selection=selection, loss_on=loss_on, teacher_weights=teacher_weights
    )
    return Stream(data, StreamConfig(sequence_length=length, batch_tokens=length * sequences, seed=seed), temperature)
