"""Ingest: a corpus to text parts and a plan, the same one however often it is interrupted."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from uuid import uuid4

import pytest

from logitstore import ingest as ingest_module
from logitstore.columns import TEXT_ID, find_answers
from logitstore.corpus import FieldMap, list_files
from logitstore.documents import Document, Segment
from logitstore.errors import CorpusError, StorageError
from logitstore.ingest import ingest, plan_recipe
from logitstore.plan import HELD_OUT, TRAIN, Plan, PlanSettings
from logitstore.recipes import recipe_path
from logitstore.storage import Storage
from logitstore.store import Store
from logitstore.text_parts import read_documents_of, text_recipe

SETTINGS = PlanSettings.for_corpus(0, 0.1, block_bytes=600)


@pytest.fixture
def store():
    return Store.open_or_create(f"memory://{uuid4().hex}")


def write_rows(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts(num_prompts: int, answers: int = 3) -> list[dict[str, str]]:
    return [
        {"prompt": f"question {number}: ", "completion": f"answer {answer} of {number}"}
        for number in range(num_prompts)
        for answer in range(answers)
    ]


def texts_of(store: Store, plan: Plan, split: str) -> list[Document]:
    found = []
    for block, answers in zip(plan.blocks, find_answers(store, plan, []), strict=True):
        documents = read_documents_of(store.part(answers[TEXT_ID].part))
        assert len(documents) == block.num_documents == len(block.multiplicities) == len(block.sources)
        assert sum(document.num_bytes for document in documents) == block.num_bytes
        found += documents if block.split == split else []
    return found


def test_all_documents_are_stored_once(store, tmp_path):
    rows = prompts(40)
    path = write_rows(tmp_path / "a.jsonl", rows)
    found = ingest(store, list_files([str(path)]), SETTINGS)
    stored = texts_of(store, found.plan, TRAIN) + texts_of(store, found.plan, HELD_OUT)
    expected = [(Segment("prompt", row["prompt"]), Segment("completion", row["completion"])) for row in rows]
    assert Counter(document.segments for document in stored) == Counter(expected)
    assert found.report is not None
    assert found.report.num_documents == 120
    assert len(found.plan.blocks) > 4
    assert store.plan(found.plan_digest) == found.plan


def test_order_within_a_split_is_the_corpus(store, tmp_path):
    rows = [{"text": f"{number:04d}"} for number in range(300)]
    found = ingest(store, list_files([str(write_rows(tmp_path / "a.jsonl", rows))]), SETTINGS)
    for split in (TRAIN, HELD_OUT):
        texts = [document.text for document in texts_of(store, found.plan, split)]
        assert texts == sorted(texts)
        assert len(texts) > 3


def test_prompt_is_never_on_both_sides(store, tmp_path):
    found = ingest(store, list_files([str(write_rows(tmp_path / "a.jsonl", prompts(60)))]), SETTINGS)
    sides = [
        {document.segments[0].content for document in texts_of(store, found.plan, split)} for split in (TRAIN, HELD_OUT)
    ]
    assert sides[0]
    assert sides[1]
    assert not sides[0] & sides[1]


def test_duplicates_are_counted_and_stored_once(store, tmp_path):
    rows = [{"text": "twice"}, {"text": "once"}, {"text": "twice"}]
    more = [{"text": "twice"}, {"prompt": "tw", "completion": "ice"}]
    files = [write_rows(tmp_path / "a.jsonl", rows), write_rows(tmp_path / "b.jsonl", more)]
    found = ingest(store, list_files(map(str, files)), PlanSettings(600, 0))
    (block,) = found.plan.blocks
    assert [document.text for document in texts_of(store, found.plan, TRAIN)] == ["twice", "once", "twice"]
    assert block.multiplicities == (3, 1, 1)
    assert [found.plan.sources[source] for source in block.sources] == [str(files[0])] * 2 + [str(files[1])]


@pytest.mark.parametrize("num_documents", [2, 3, 10])
def test_tiny_corpus_holds_out_one_document(store, tmp_path, num_documents):
    for seed in range(4):  # whatever the digests happen to be, also those below the fraction
        rows = [{"text": f"{seed} {number}"} for number in range(num_documents)]
        path = write_rows(tmp_path / f"{seed}.jsonl", rows)
        for fraction in (1e-9, 1 - 1e-9):
            plan = ingest(store, list_files([str(path)]), PlanSettings.for_corpus(0, fraction)).plan
            assert len(texts_of(store, plan, HELD_OUT)) == 1
            assert len(texts_of(store, plan, TRAIN)) == num_documents - 1


@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.999])
def test_corpus_of_one_prompt_is_for_training(store, tmp_path, fraction):
    """One text file, or samples of one prompt: held out, they would leave nothing to train on."""
    path = write_rows(tmp_path / "a.jsonl", prompts(1, answers=4))
    plan = ingest(store, list_files([str(path)]), PlanSettings.for_corpus(0, fraction)).plan
    assert [block.split for block in plan.blocks] == [TRAIN]


@pytest.mark.parametrize(("fraction", "split"), [(0.0, TRAIN), (1.0, HELD_OUT)])
def test_nothing_or_everything_is_held_out_on_request(store, tmp_path, fraction, split):
    path = write_rows(tmp_path / "a.jsonl", prompts(10))
    plan = ingest(store, list_files([str(path)]), PlanSettings.for_corpus(0, fraction)).plan
    assert {block.split for block in plan.blocks} == {split}


def test_calibration_block_is_a_training_block_and_stays(store, tmp_path):
    rows = [{"text": f"document {number}"} for number in range(200)]
    first = ingest(store, list_files([str(write_rows(tmp_path / "a.jsonl", rows))]), SETTINGS).plan
    chosen = first.settings.calibration_block
    assert chosen == min(block.digest for block in first.blocks if block.split == TRAIN)
    grown = [{"text": f"more {number}"} for number in range(200)]
    write_rows(tmp_path / "b.jsonl", grown)
    second = ingest(store, list_files([f"{tmp_path}/*.jsonl"]), first.settings).plan
    assert second.settings == first.settings


def test_unchanged_files_are_not_read_again(store, tmp_path, monkeypatch):
    files = [str(write_rows(tmp_path / "a.jsonl", prompts(10)))]
    first = ingest(store, list_files(files), SETTINGS)
    monkeypatch.setattr(ingest_module, "read_documents", lambda *arguments: pytest.fail("was read again"))
    again = ingest(store, list_files(files), SETTINGS)
    assert (again.plan_digest, again.plan, again.report) == (first.plan_digest, first.plan, None)
    monkeypatch.undo()
    monkeypatch.setattr(ingest_module, "read_documents", lambda *arguments: pytest.fail("was read again"))
    assert ingest(store, list_files(files), first.plan.settings).plan_digest == first.plan_digest
    monkeypatch.undo()
    os.utime(files[0], ns=(0, 0))
    touched = ingest(store, list_files(files), SETTINGS)
    assert touched.report is not None
    assert touched.plan_digest == first.plan_digest
    for other in (
        ingest(store, list_files(files), PlanSettings(900, SETTINGS.held_out_below)),
        ingest(store, list_files(files), SETTINGS, on_error="skip"),
        ingest(store, list_files(files), SETTINGS, FieldMap(text="body")),
    ):
        assert other.report is not None


def test_identity_ignores_where_files_are(store, tmp_path):
    rows = prompts(30)
    write_rows(tmp_path / "a.jsonl", rows)
    (tmp_path / "deep").mkdir()
    write_rows(tmp_path / "deep" / "1.jsonl", rows[:40])
    write_rows(tmp_path / "deep" / "2.jsonl", rows[40:])
    one = ingest(store, list_files([str(tmp_path / "a.jsonl")]), SETTINGS).plan
    two = ingest(store, list_files([str(tmp_path / "deep")]), SETTINGS).plan
    assert one.sources != two.sources
    assert one.identity == two.identity


def test_plan_recipe_holds_no_path(tmp_path):
    path = write_rows(tmp_path / "private.jsonl", [])
    assert "private" not in json.dumps(plan_recipe(list_files([str(path)]), SETTINGS, FieldMap(), "raise"))


def test_grown_corpus_keeps_most_blocks(store, tmp_path):
    rows = [{"text": f"document {number} " + "x" * (number % 50)} for number in range(600)]
    before = ingest(store, list_files([str(write_rows(tmp_path / "a.jsonl", rows))]), SETTINGS).plan
    rows[300:300] = [{"text": "inserted"}]
    after = ingest(store, list_files([str(write_rows(tmp_path / "a.jsonl", rows))]), before.settings).plan
    old, new = ({block.digest for block in plan.blocks} for plan in (before, after))
    assert len(old) > 30
    assert len(old - new) <= 6


# Interruptions


class Killed(BaseException):
    """No handler may catch it, as none catches SIGKILL."""


class FailingStorage(Storage):
    """Passes on to another storage until the k-th write, which does not happen."""

    def __init__(self, inner: Storage, writes_left: int, fault: BaseException) -> None:
        self.inner, self.url, self.writes_left, self.fault = inner, inner.url, writes_left, fault

    def _count(self) -> None:
        if self.writes_left == 0:
            raise self.fault
        self.writes_left -= 1

    def read(self, name):
        return self.inner.read(name)

    def write(self, name, data):
        self._count()
        self.inner.write(name, data)

    def create(self, name, data):
        self._count()
        return self.inner.create(name, data)

    def read_range(self, name, begin, end):
        return self.inner.read_range(name, begin, end)

    def delete(self, name):
        self.inner.delete(name)

    def entry(self, name):
        return self.inner.entry(name)

    def list_entries(self, prefix):
        return self.inner.list_entries(prefix)

    def child_url(self, name):
        return self.inner.child_url(name)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A corpus, its plan's digest, and the number of writes that making it takes."""
    path = write_rows(tmp_path_factory.mktemp("corpus") / "a.jsonl", prompts(20))
    store = Store.open_or_create(f"memory://{uuid4().hex}")
    counting = FailingStorage(store.storage, 1 << 30, Killed())
    found = ingest(Store(counting), list_files([str(path)]), SETTINGS)
    assert len(found.plan.blocks) >= 3
    return path, found, (1 << 30) - counting.writes_left


def test_killed_at_many_a_write_and_run_again_gives_the_same_plan(uninterrupted):
    """At many writes, each on a store of its own; and one store that is killed at all of them, one after the other."""
    path, expected, num_writes = uninterrupted
    worn = Store.open_or_create(f"memory://{uuid4().hex}")
    for writes in range(0, num_writes, 3):  # of the five or more objects of each part, every third
        fresh = Store.open_or_create(f"memory://{uuid4().hex}")
        for store in (fresh, worn):
            try:
                ingest(Store(FailingStorage(store.storage, writes, Killed())), list_files([str(path)]), SETTINGS)
            except Killed:
                pass
            else:
                assert store is worn, "the plan was written by an attempt before"
        check_complete(fresh, path, expected)
    check_complete(worn, path, expected)


def check_complete(store: Store, path: Path, expected) -> None:
    found = ingest(store, list_files([str(path)]), SETTINGS)
    assert found.plan_digest == expected.plan_digest
    assert len(texts_of(store, found.plan, TRAIN)) + len(texts_of(store, found.plan, HELD_OUT)) == 60


def test_full_disk_during_ingest_is_said_and_survived(uninterrupted, store):
    path, expected, num_writes = uninterrupted
    failing = FailingStorage(store.storage, num_writes // 2, StorageError("x: no space left"))
    with pytest.raises(StorageError, match="no space left"):
        ingest(Store(failing), list_files([str(path)]), SETTINGS)
    check_complete(store, path, expected)


# Corpora of nothing


@pytest.mark.parametrize("rows", [[], ["not an object"], [{"text": ""}], [{"text": ""}, 7, {"other": "x"}]])
def test_corpus_without_a_document_is_a_clear_error(store, tmp_path, rows):
    path = write_rows(tmp_path / "a.jsonl", rows)
    with pytest.raises(CorpusError, match="no documents found") as caught:
        ingest(store, list_files([str(path)]), SETTINGS, on_error="skip")
    unreadable = sum(not isinstance(row, dict) or "text" not in row for row in rows)
    assert f"({unreadable} unreadable rows, {len(rows) - unreadable} empty)" in str(caught.value)
    assert str(path) in str(caught.value)
    assert not store.datasets()


def test_unreadable_row_stops_ingest_and_leaves_no_plan(store, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [*prompts(3), {"prompt": 7}])
    with pytest.raises(CorpusError, match=r"a\.jsonl:10"):
        ingest(store, list_files([str(path)]), SETTINGS)
    assert list(store.storage.list("plans")) == []
    assert ingest(store, list_files([str(path)]), SETTINGS, on_error="skip").report.num_skipped == 1


def test_text_that_a_repair_dropped_is_read_again(tmp_path):
    store = Store.open_or_create(str(tmp_path / "store"))
    files = list_files([str(write_rows(tmp_path / "a.jsonl", prompts(40)))])
    plan = ingest(store, files, SETTINGS).plan
    dropped = tmp_path / "store" / recipe_path(text_recipe(plan.blocks[0].digest))
    dropped.unlink()
    again = ingest(store, files, SETTINGS)
    assert again.report is not None
    assert again.plan.identity == plan.identity
    assert dropped.exists()
