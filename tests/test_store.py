"""Stores: opened or refused, and dataset versions that no race loses."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from uuid import uuid4

import pytest

import logitstore
from logitstore.errors import DamageError, StorageError, StoreError
from logitstore.manifest import Column, Manifest
from logitstore.plan import Plan, PlanBlock, PlanSettings
from logitstore.records import seal_record
from logitstore.storage import open_storage
from logitstore.store import FORMAT, Store

PLAN = Plan(PlanSettings(4096, 0), (PlanBlock("aa" * 32, "train", 1, 5, (1,), (0,)),), ("a",))


@pytest.fixture(params=["folder", "memory"])
def url(request, tmp_path):
    return str(tmp_path / "store") if request.param == "folder" else f"memory://{uuid4().hex}"


@pytest.fixture
def store(url):
    return Store.open_or_create(url)


def column(name: str) -> Column:
    return Column({"kind": "tokens", "tokenizer": name}, name, (None,))


def adding(store: Store, *names: str):
    plan_digest = store.put_plan(PLAN)

    def change(current: Manifest | None) -> Manifest:
        return (current or Manifest(plan_digest, PLAN, ())).with_columns([column(name) for name in names])

    return change


def labels(manifest: Manifest) -> set[str]:
    return {column.label for column in manifest.columns}


# Opening


def test_open_or_create_then_open(url):
    created = Store.open_or_create(url)
    header = json.loads(created.storage.read("store.json"))
    assert (header["format"], header["digest_name"]) == (FORMAT, "blake3")
    assert Store.open_or_create(url).datasets() == Store.open(url).datasets() == logitstore.open(url).datasets() == {}


def test_open_where_nothing_is_says_so(url):
    for call in (Store.open, logitstore.open):
        with pytest.raises(StoreError, match="no store here"):
            call(url)


def test_folder_that_is_not_a_store_is_refused(url):
    storage = open_storage(url)
    storage.write("thesis/chapter.tex", b"mine")
    with pytest.raises(StoreError, match=r"not empty and not a store \(found thesis/chapter.tex\)"):
        Store.open_or_create(url)
    assert list(storage.list("")) == ["thesis/chapter.tex"]


def test_file_in_place_of_a_store_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(StorageError, match="cannot write"):
        Store.open_or_create(str(path))
    with pytest.raises(StoreError, match="no store here"):
        Store.open(str(path))
    assert path.read_text() == "mine"


def test_leftovers_of_a_killed_writer_are_no_strangers(tmp_path):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "0123").write_bytes(b"half")
    Store.open_or_create(str(tmp_path))


def test_newer_format_is_refused_in_a_sentence(url):
    newer = seal_record({"format": FORMAT + 1, "digest_name": "blake3", "future": {"x": ["1"]}})
    open_storage(url).write("store.json", newer)
    for call in (Store.open, Store.open_or_create):
        with pytest.raises(StoreError, match=f"format {FORMAT + 1}.*upgrade logitstore"):
            call(url)


def test_damaged_header_is_named(url, store):
    store.storage.write("store.json", store.storage.read("store.json").replace(b"blake3", b"blake2"))
    with pytest.raises(DamageError, match=r"store\.json"):
        Store.open(url)


def test_creators_who_race_all_open_the_store(url):
    """Who is slow finds not only the store made meanwhile but objects in it, and must not take them for strangers."""
    num_threads = 8
    barrier = threading.Barrier(num_threads)

    def work(number: int) -> str:
        barrier.wait()
        return Store.open_or_create(url).put_asset(b"%d" % number)

    with ThreadPoolExecutor(num_threads) as pool:
        assert len(set(pool.map(work, range(num_threads)))) == num_threads


def test_store_made_between_a_look_and_a_listing_is_no_stranger(url, monkeypatch):
    storage = open_storage(url)
    looked = []
    exists = type(storage).exists

    def exists_late(self, name):
        found = exists(self, name)
        if not looked:
            looked.append(name)
            monkeypatch.setattr(type(storage), "exists", exists)
            Store.open_or_create(url).put_asset(b"of the other process")
        return found

    monkeypatch.setattr(type(storage), "exists", exists_late)
    assert Store.open_or_create(url).storage.exists("store.json")
    assert looked == ["store.json"]


def test_file_system_that_overwrites_is_refused(url, monkeypatch):
    """Without a create that refuses the second, racing workers would lose each other's answers."""
    storage = open_storage(url)

    def create(self, name, data):
        self.write(name, data)
        return True

    monkeypatch.setattr(type(storage), "create", create)
    with pytest.raises(StoreError, match="overwrites objects"):
        Store.open_or_create(url)


# Objects by digest


def test_asset_reads_back_and_is_checked(store):
    digest = store.put_asset(b"tokenizer")
    assert store.asset(digest) == b"tokenizer"
    store.storage.write(f"assets/{digest}", b"tokenizes")
    with pytest.raises(DamageError, match=f"assets/{digest}: damaged"):
        store.asset(digest)
    with pytest.raises(DamageError, match="missing"):
        store.asset("00" * 32)


def test_plan_reads_back(store):
    assert store.plan(store.put_plan(PLAN)) == PLAN


# Datasets


def test_publish_makes_numbered_versions(store):
    first = store.publish("d", adding(store, "a"))
    second = store.publish("d", adding(store, "b"))
    assert (first.number, second.number) == (1, 2)
    assert labels(store.dataset("d").manifest) == {"a", "b"}
    assert labels(store.dataset("d", 1).manifest) == {"a"}
    assert store.datasets() == {"d": 2}
    assert store.versions() == [("d", 1), ("d", 2)]


def test_publish_of_no_change_makes_no_version(store):
    first = store.publish("d", adding(store, "a"))
    assert store.publish("d", lambda current: current) == first
    assert store.publish("d", adding(store, "a")) == first
    assert store.datasets() == {"d": 1}


def test_publish_of_a_new_label_makes_a_version(store):
    first = store.publish("d", adding(store, "a"))
    renamed = store.publish("d", lambda current: current.with_columns([replace(column("a"), label="new")]))
    assert renamed.number == 2
    assert renamed.manifest.identity == first.manifest.identity


def test_publish_by_a_beaten_writer_is_reapplied_to_the_winner(store):
    """The other version comes between reading the newest and creating the next."""
    beaten = []

    def change(current: Manifest | None) -> Manifest:
        if not beaten:
            beaten.append(current)
            store.publish("d", adding(store, "other"))
        return adding(store, "mine")(current)

    version = store.publish("d", change)
    assert beaten == [None]
    assert version.number == 2
    assert labels(store.dataset("d").manifest) == {"other", "mine"}


def test_racing_publishers_all_survive(url, store):
    num_threads = 6
    barrier = threading.Barrier(num_threads)

    def work(number: int) -> int:
        own = Store.open(url)
        barrier.wait()
        return own.publish("d", adding(own, f"column {number}")).number

    with ThreadPoolExecutor(num_threads) as pool:
        numbers = list(pool.map(work, range(num_threads)))
    assert sorted(numbers) == list(range(1, num_threads + 1))
    assert labels(store.dataset("d").manifest) == {f"column {number}" for number in range(num_threads)}
    for number in range(1, num_threads + 1):
        assert len(store.dataset("d", number).manifest.columns) == number


def test_racing_publishers_of_one_change_make_one_version(url, store):
    with ThreadPoolExecutor(6) as pool:
        numbers = list(pool.map(lambda _: Store.open(url).publish("d", adding(store, "a")).number, range(6)))
    assert set(numbers) == {1}
    assert store.datasets() == {"d": 1}


def test_racing_processes_publish_all(tmp_path):
    script = textwrap.dedent("""
        import sys
        from logitstore.manifest import Column, Manifest
        from logitstore.plan import Plan, PlanSettings
        from logitstore.store import Store
        url, name = sys.argv[1:]
        plan, store = Plan(PlanSettings(4096, 0), (), ()), Store.open_or_create(url)
        digest = store.put_plan(plan)
        print("ready", flush=True)
        sys.stdin.readline()
        for n in range(4):
            column = Column({"kind": "tokens", "tokenizer": f"{name}.{n}"}, f"{name}.{n}", ())
            store.publish("d", lambda current: (current or Manifest(digest, plan, ())).with_columns([column]))
    """)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "store"), name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for name in "ab"
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    for process in processes:
        process.communicate("\n")
        assert process.returncode == 0
    store = Store.open(str(tmp_path / "store"))
    assert labels(store.dataset("d").manifest) == {f"{name}.{n}" for name in "ab" for n in range(4)}
    assert store.datasets() == {"d": 8}


def test_publish_whose_create_was_answered_by_silence_makes_one_version(url, store, monkeypatch):
    """The create is said to have found something, and that is our own write: the same change again changes nothing."""
    create = type(store.storage).create

    def create_silently(self, name, data):
        created = create(self, name, data)
        return created and not name.startswith("datasets/")

    monkeypatch.setattr(type(store.storage), "create", create_silently)
    assert store.publish("d", adding(store, "a")).number == 1
    assert store.datasets() == {"d": 1}


def test_unknown_dataset_lists_those_there_are(store):
    with pytest.raises(StoreError, match="no dataset 'x'; there are: none yet"):
        store.dataset("x")
    for name in ("beta", "alpha"):
        store.publish(name, adding(store, "a"))
    with pytest.raises(StoreError, match="no dataset 'x'; there are: alpha, beta"):
        store.dataset("x")
    with pytest.raises(StoreError, match="'alpha' has no version 7"):
        store.dataset("alpha", 7)


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../up", "a b", "a\n", "a%"])
def test_dataset_name_that_is_no_name_is_refused(store, name):
    with pytest.raises(StoreError, match="dataset name"):
        store.publish(name, adding(store, "a"))
    assert store.datasets() == {}


def test_names_that_begin_alike_are_kept_apart(store):
    for name in ("d", "d1", "d.1", "D-1", "_"):
        assert store.publish(name, adding(store, "a")).number == 1
    assert store.datasets() == dict.fromkeys(["D-1", "_", "d", "d.1", "d1"], 1)


def test_files_that_are_no_versions_are_overlooked(store):
    """What sync clients and editors leave behind."""
    store.publish("d", adding(store, "a"))
    for name in (
        "datasets/.DS_Store",
        "datasets/d/1.json~",
        "datasets/d/x.json",
        "datasets/d/01.json",
        "datasets/d/0.json",
    ):
        store.storage.write(name, b"")
    assert store.datasets() == {"d": 1}
    assert store.publish("d", adding(store, "b")).number == 2


def test_damaged_manifest_is_named(store):
    store.publish("d", adding(store, "a"))
    (path,) = store.storage.list("manifests")
    store.storage.write(path, store.storage.read(path)[:-1])
    with pytest.raises(DamageError, match=path):
        store.dataset("d")


def test_column_part_of_a_hole_says_what_to_do(store):
    with pytest.raises(StoreError, match="block 0 has no answer yet; run `logitstore produce`"):
        store.column_part(column("a"), 0)
