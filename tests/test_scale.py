"""A hundred thousand blocks: opened in seconds and megabytes, published by pages, found without asking for each."""

from __future__ import annotations

import shutil
import sys
from collections import Counter

import pytest
from big_dataset import open_elsewhere, write_big_dataset
from counting import CountingStorage
from small_store import Silent
from stores import DATASET, fill_store

from logitstore import reading
from logitstore.columns import next_manifest
from logitstore.consumer.data import TrainingData
from logitstore.corpus_files import list_files
from logitstore.dropped import mark_dropped
from logitstore.hub import load_tokenizer
from logitstore.ingest import ingest
from logitstore.producer.request import ProduceConfig, TeacherRequest
from logitstore.producer.run import produce
from logitstore.recipes import recipe_path
from logitstore.storage import open_storage
from logitstore.store import Store
from logitstore.text_columns import TextColumns
from logitstore.text_parts import text_recipe
from logitstore.tokenizer import Tokenizer

MAX_RSS_BYTES = 300 * 10**6


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_opening_takes_little_memory(tmp_path):
    """How long it takes is in ``benchmarks/bench_read.py``: tests measure no time."""
    manifest = write_big_dataset(str(tmp_path / "store"))
    found = open_elsewhere(str(tmp_path / "store"))
    assert found["identity"] == manifest.identity
    assert found["part"] == manifest.columns[3].cells.part(77_777)
    assert found["block"] == manifest.plan.blocks.digests[77_777]
    assert sorted(found["multiplicities"]) == [1] * 999 + [2]
    assert found["peak_bytes"] < MAX_RSS_BYTES


# What a trainer asks for


@pytest.mark.parametrize("range_bytes", [8 << 20, 300])
def test_epoch_reads_pages_once_and_data_in_ranges_and_nothing_else(small, monkeypatch, range_bytes):
    monkeypatch.setattr(reading, "RANGE_BYTES", range_bytes)
    storage = CountingStorage(open_storage(small.url))
    store = Store(storage)
    student = Tokenizer.from_folder(small.other)  # another one than the teachers', so alignments are read, too
    data = TrainingData.open(store, store.dataset("mixed"), student, selection="topk")
    used = {data._tokens.id: data._tokens}
    for teacher in data.teachers:
        used |= {column.id: column for column in (teacher.sparse, teacher.scalars, teacher.alignment, teacher.tokens)}
    wanted: Counter[str] = Counter()
    for column in used.values():
        for part in (small.store.part(column.cells[block].part) for block in data.train_blocks):
            for array, indexed in part.index.items():
                for stored in indexed.objects:
                    wanted[f"{part.path}/{array}/{stored.key}"] = max(1, -(-stored.num_bytes // range_bytes))
    pages = set().union(*(column.page_digests() for column in used.values()))
    for epoch in range(2):
        storage.requests.clear()
        for block in data.train_blocks:
            data.load(block)
        assert set(storage.by_folder("read")) == {"pages", "parts"} - ({"pages"} if epoch else set())
        assert Counter(storage.names("read", "parts/")) == wanted
        assert sorted(storage.names("read", "pages/")) == ([] if epoch else sorted(f"pages/{page}" for page in pages))
        assert len(storage.requests) == len(storage.names("read"))


# What a producer asks for


def lookups(storage: CountingStorage) -> list[str]:
    return storage.names("read", "recipes/") + storage.names("entry", "recipes/")


def check_no_large_listing(storage: CountingStorage, *own: str) -> None:
    """``own``: the folders that grow with a dataset's versions or with what was ever damaged, not with its blocks."""
    assert set(storage.names("list")) <= {"dropped", "gc", f"datasets/{DATASET}", "heartbeats", *own}


@pytest.fixture
def filled(tmp_path):
    fill_store(str(tmp_path / "store"), tmp_path)
    storage = CountingStorage(open_storage(str(tmp_path / "store")))
    return storage, Store(storage)


def republish(store: Store) -> int:
    digest = store.dataset(DATASET).manifest.plan_digest
    return store.publish(DATASET, lambda current: next_manifest(store, current, digest, {})).number


def test_finished_dataset_is_published_again_without_a_look_at_its_blocks(filled):
    storage, store = filled
    assert republish(store) == 1
    assert lookups(storage) == storage.names("read", "parts/") == storage.names("entry", "parts/") == []
    assert storage.names("write") == storage.names("create") == []
    check_no_large_listing(storage)


def test_dropped_answer_is_the_only_one_looked_for(filled):
    storage, store = filled
    manifest = store.dataset(DATASET).manifest
    number, (text,) = 2, manifest.find("text")
    path = recipe_path(text_recipe(manifest.plan.blocks[number].digest))
    mark_dropped(store.storage, text.cells[number].part)
    storage.delete(path)
    storage.requests.clear()
    assert republish(store) == 2
    assert lookups(storage) == [path]
    holes = [column.num_holes for column in store.dataset(DATASET).manifest.columns]
    assert holes == [1] * len(holes)  # what builds on the text cannot be found without it
    check_no_large_listing(storage)


def test_columns_of_a_finished_dataset_are_filled_without_a_look_at_its_blocks(filled, tmp_path):
    storage, store = filled
    manifest = store.dataset(DATASET).manifest
    texts = TextColumns(store, manifest.plan, manifest)
    for folder in ("bytelevel", "metaspace"):
        texts.add_tokens(Tokenizer.from_folder(tmp_path / folder), folder)
    storage.requests.clear()
    texts.fill()
    assert Counter(method for method, _ in storage.requests) == {"list": 1}
    check_no_large_listing(storage)


def test_corpus_that_is_known_is_not_looked_for_block_by_block(filled, tmp_path):
    storage, store = filled
    manifest = store.dataset(DATASET).manifest
    files = list_files([str(tmp_path / "corpus.jsonl")])
    found = ingest(store, files, manifest.plan.settings, current=manifest)
    assert (found.report, found.plan) == (None, manifest.plan)
    assert len(lookups(storage)) == 1
    check_no_large_listing(storage)


def test_newest_version_is_found_without_listing_other_datasets(filled):
    storage, store = filled
    for name in ("other", f"{DATASET}2"):
        store.publish(name, lambda current: store.dataset(DATASET).manifest)
    storage.requests.clear()
    assert store.find_dataset(DATASET).number == 1
    assert store.find_dataset("none") is None
    assert set(storage.names("list")) == {f"datasets/{DATASET}", "datasets/none"}
    assert storage.by_folder("read") == {"datasets": 1, "manifests": 1, "plans": 1}


def test_finished_run_of_a_teacher_asks_for_no_block(small, tmp_path):
    """All of ``produce`` on what is there already."""
    shutil.copytree(small.url, tmp_path / "store")
    storage = CountingStorage(open_storage(str(tmp_path / "store")))
    store = Store(storage)
    version = store.dataset("mixed")
    config = ProduceConfig(select="topk:6", temperatures=(1.0, 2.0), device="cpu", threads=1, max_length=256)
    requests = [TeacherRequest.parse(f"{name}={path}", config) for name, path in small.teachers.items()]
    students = [("other", load_tokenizer(small.other))]
    storage.requests.clear()
    report = produce(store, "mixed", version.manifest.plan_digest, requests, students, config, Silent())
    assert (report.num_forward_tokens, report.dataset.number) == (0, version.number)
    assert lookups(storage) == storage.names("read", "parts/") == []
    assert len(storage.requests) < 30
    check_no_large_listing(storage, "datasets/mixed")
