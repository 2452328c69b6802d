"""Students' columns are filled beside the teacher: it never waits for them, and what goes wrong there ends the run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_store import THETA, Silent, SmallStore

from logitstore.documents import Document
from logitstore.errors import TokenizerError
from logitstore.hub import load_tokenizer
from logitstore.producer.request import ProduceConfig, TeacherRequest
from logitstore.producer.run import ProduceReport, produce
from logitstore.store import Store
from logitstore.tokenized_document import TokenizedDocument
from logitstore.tokenizer import Tokenizer

_SECONDS = 60.0
"""How long a test waits before it fails."""


class _Watched(Tokenizer):
    """A student's tokenizer that does something before it cuts."""

    def watch(self, before: Any) -> _Watched:
        self._before = before
        return self

    def tokenize(self, documents: Sequence[Document]) -> list[TokenizedDocument]:
        self._before()
        return super().tokenize(documents)


class _Progress(Silent):
    def __init__(self) -> None:
        self.num_scored, self.begun = 0, []
        self.enough = threading.Event()

    def begin(self, *values: object) -> None:
        self.begun.append(values)

    def advance(self, *_: object) -> None:
        self.num_scored += 1
        self.enough.set()


def _run(small: SmallStore, url: Path, before: Any, progress: Any) -> ProduceReport:
    """A new store with the small one's plan: its teacher ``big`` from scratch, and a watched student."""
    source, store = small.store, Store.open_or_create(str(url))
    plan = small.version.manifest.plan_digest
    _copy_texts(source, store)
    config = ProduceConfig(select=f"threshold:{THETA}", device="cpu", threads=1, max_length=256)
    students = [("other", _watched(small.other, before))]
    return produce(
        store, "d", plan, [TeacherRequest.parse(f"big={small.teachers['big']}", config)], students, config, progress
    )


def _watched(folder: str, before: Any) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    tokenizer.__class__ = _Watched
    assert isinstance(tokenizer, _Watched)
    return tokenizer.watch(before)


def _copy_texts(source: Store, store: Store) -> None:
    manifest = source.dataset("mixed").manifest
    store.storage.write(f"plans/{manifest.plan_digest}", source.storage.read(f"plans/{manifest.plan_digest}"))
    for column in manifest.find("text"):
        for cell in column.cells:
            assert cell is not None
            for name in source.storage.list(f"parts/{cell.part}"):
                store.storage.write(name, source.storage.read(name))
    for name in source.storage.list("recipes"):
        data = source.storage.read(name)
        if b'"kind":"text"' in data.replace(b" ", b""):
            store.storage.create(name, data)


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "logitstore columns"]


def test_teacher_does_not_wait_for_students(small: SmallStore, tmp_path: Path) -> None:
    progress = _Progress()

    def wait_for_the_teacher() -> None:
        assert progress.enough.wait(_SECONDS), "the teacher has scored nothing: it waits for the student"

    report = _run(small, tmp_path / "store", wait_for_the_teacher, progress)
    assert progress.num_scored > 0
    assert all(column.num_holes == 0 for column in report.dataset.manifest.columns)
    expected = next(small.version.manifest.find("alignment"))
    found = next(report.dataset.manifest.find("alignment"))
    assert found.cells == expected.cells
    assert [name for name, *_ in progress.begun] == ["big", "students"]
    assert not _threads()


def test_error_of_a_student_ends_the_run_as_it_is(small: SmallStore, tmp_path: Path) -> None:
    def refuse() -> None:
        raise TokenizerError("this student cannot read")

    with pytest.raises(TokenizerError, match="this student cannot read"):
        _run(small, tmp_path / "store", refuse, _Progress())
    assert not _threads()
    report = _run(small, tmp_path / "store", lambda: None, _Progress())
    assert all(column.num_holes == 0 for column in report.dataset.manifest.columns)


def test_interrupt_stops_the_students_too(small: SmallStore, tmp_path: Path) -> None:
    class Interrupting(_Progress):
        def advance(self, *_: object) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(small, tmp_path / "store", lambda: None, Interrupting())
    assert not _threads()
    report = _run(small, tmp_path / "store", lambda: None, _Progress())
    assert report.num_scored_blocks == len(report.dataset.manifest.plan.blocks)
