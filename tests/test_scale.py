"""A hundred thousand blocks: opened in seconds and megabytes, published by pages, found without asking for each."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from collections import Counter

import numpy as np
import pytest
from counting import CountingStorage
from small_store import Silent
from stores import DATASET, fill_store

from logitstore import reading
from logitstore.column_cells import ColumnCells
from logitstore.columns import next_manifest
from logitstore.consumer.data import TrainingData
from logitstore.corpus_files import list_files
from logitstore.dropped import mark_dropped
from logitstore.ingest import ingest
from logitstore.manifest import Column, Manifest
from logitstore.plan import Plan, PlanBlocks, PlanSettings
from logitstore.producer.request import ProduceConfig, TeacherRequest, load_student_tokenizer
from logitstore.producer.run import produce
from logitstore.recipes import recipe_path
from logitstore.storage import open_storage
from logitstore.store import Store
from logitstore.text_columns import TextColumns
from logitstore.text_parts import text_recipe
from logitstore.tokenizer import Tokenizer
from logitstore.versions import create_version

NUM_BLOCKS = 100_000
MAX_RSS_BYTES = 300 << 20


def write_big_dataset(url: str) -> Manifest:
    """A version of 100,000 blocks and five columns, of a thousand documents a block; no part of it exists."""
    rng = np.random.default_rng(0)
    blocks = PlanBlocks(
        rng.integers(0, 256, (NUM_BLOCKS, 32), np.uint8),
        rng.random(NUM_BLOCKS) < 0.05,
        np.full(NUM_BLOCKS, 1000),
        rng.integers(3 << 20, 5 << 20, NUM_BLOCKS),
        np.zeros(NUM_BLOCKS, np.int64),
        np.column_stack([np.arange(NUM_BLOCKS), rng.integers(0, 1000, NUM_BLOCKS), np.full(NUM_BLOCKS, 2)]),
        np.column_stack([np.arange(NUM_BLOCKS), np.full(NUM_BLOCKS, 1000), np.arange(NUM_BLOCKS) // 100]),
    )
    sources = tuple(f"s3://bucket/corpus/file-{number:05d}.jsonl" for number in range(NUM_BLOCKS // 100))
    plan = Plan(PlanSettings(4 << 20, 1 << 60, "00" * 32), blocks, sources)
    kinds = ("text", "tokens", "tokens", "signal", "alignment")
    columns = tuple(
        Column({"kind": kind, "n": str(number)}, kind, random_cells(rng), {}, random_pages(rng))
        for number, kind in enumerate(kinds)
    )
    store = Store.open_or_create(url)
    manifest = Manifest(store.put_plan(plan), plan, columns)
    digest = store._put("manifests", manifest.to_parquet())
    assert create_version(store.storage, "big", 1, digest, manifest.identity)
    return manifest


def random_cells(rng: np.random.Generator) -> ColumnCells:
    stats = ("num_rows", "num_scored", "num_entries", "bytes.sparse", "bytes.rest", "bytes.metadata")
    return ColumnCells(
        np.ones(NUM_BLOCKS, bool),
        rng.integers(0, 256, (NUM_BLOCKS, 32), np.uint8),
        rng.integers(0, 256, (NUM_BLOCKS, 32), np.uint8),
        {name: rng.integers(900_000, 1_100_000, NUM_BLOCKS) for name in stats},
    )


def random_pages(rng: np.random.Generator) -> tuple[tuple[int, str], ...]:
    return tuple((end, rng.bytes(32).hex()) for end in (*range(256, NUM_BLOCKS, 256), NUM_BLOCKS))


OPEN = textwrap.dedent("""
    import json, sys, time
    import logitstore
    began = time.perf_counter()
    manifest = logitstore.open(sys.argv[1]).dataset("big").manifest
    cell, block = manifest.columns[3].cells[77_777], manifest.plan.blocks[77_777]
    identity, seconds = manifest.identity, time.perf_counter() - began
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    found = [identity, cell.part, block.digest, list(block.multiplicities), int(peak.split()[1]) << 10, seconds]
    print(json.dumps(found))
""")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_opening_takes_little_memory(tmp_path):
    """How long it takes is in ``benchmarks/bench_read.py``: tests measure no time."""
    manifest = write_big_dataset(str(tmp_path / "store"))
    ran = subprocess.run(
        [sys.executable, "-c", OPEN, str(tmp_path / "store")], capture_output=True, text=True, check=True
    )
    identity, part, block, multiplicities, peak, _ = json.loads(ran.stdout)
    assert identity == manifest.identity
    assert part == manifest.columns[3].cells.parts[77_777].tobytes().hex()
    assert block == manifest.plan.blocks.digests[77_777]
    assert sorted(multiplicities) == [1] * 999 + [2]
    assert peak < MAX_RSS_BYTES


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
        used |= {column.id: column for column in (teacher.sparse, teacher.scalars, teacher.alignment)}
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
    students = [("other", load_student_tokenizer(small.other))]
    storage.requests.clear()
    report = produce(store, "mixed", version.manifest.plan_digest, requests, students, config, Silent())
    assert (report.num_forward_tokens, report.dataset.number) == (0, version.number)
    assert lookups(storage) == storage.names("read", "parts/") == []
    assert len(storage.requests) < 30
    check_no_large_listing(storage, "datasets/mixed")
