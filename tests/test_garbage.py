"""Garbage: what nothing refers to is freed in two steps; what anything refers to, or comes to refer to, never is."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from stores import DATASET, fill_store

from logitstore import freeing, garbage, heartbeats, pins, versions
from logitstore.columns import next_manifest
from logitstore.errors import DamageError, FreedError, StoreError
from logitstore.garbage import Collected, collect
from logitstore.heartbeats import alive
from logitstore.manifest import Manifest
from logitstore.plan import Plan
from logitstore.recipes import find_answer
from logitstore.records import open_record
from logitstore.staging import ArrayToStore, StagedPart, stage, upload
from logitstore.store import Store
from logitstore.verification import verify

DAY = 86400.0


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    return fill_store(str(tmp_path_factory.mktemp("filled") / "store"), tmp_path_factory.mktemp("inputs"))[0]


@pytest.fixture
def store(filled, tmp_path):
    shutil.copytree(filled.storage.url, tmp_path / "store")
    return Store.open(str(tmp_path / "store"))


def later(store: Store, days: float, grace_days: float = 7.0, **options) -> Collected:
    """A collection some days from now."""
    return collect(store, grace_days * DAY, now=time.time() + days * DAY, **options)


def names(store: Store, *folders: str) -> set[str]:
    return {name for folder in folders or ("",) for name in store.storage.list(folder)}


def drop(store: Store, number: int | None = None, name: str = DATASET) -> None:
    record = next(versions.kept_versions(store.storage, name))
    versions.drop_version(store.storage, versions.read_version(store.storage, name, number or record.number))


def test_nothing_of_a_dataset_is_collected(store):
    before = names(store)
    for days in (0, 30, 365):
        found = later(store, days)
        assert (found.sentenced, found.freed, found.waiting) == ([], [], [])
    assert names(store) == before


def test_a_dropped_dataset_is_freed_in_two_steps(store):
    parts = names(store, "parts")
    drop(store)
    first = later(store, 8)
    assert len(first.sentenced) > 10
    assert first.freed == []
    assert names(store, "parts") == parts  # readers of before still find them
    assert names(store, "recipes") == set()  # but nobody finds them anew
    assert later(store, 9).freed == []
    last = later(store, 16)
    assert sorted(last.freed) == sorted(first.sentenced)
    assert last.num_bytes_freed == first.num_bytes_sentenced > 0
    assert {name.split("/")[0] for name in names(store)} == {"store.json", "datasets"}
    assert verify(store).faults == ()


def test_a_dry_run_says_the_same_and_changes_nothing(store):
    drop(store)
    before = {name: store.storage.read(name) for name in names(store)}
    told = later(store, 8, dry_run=True)
    assert {name: store.storage.read(name) for name in names(store)} == before
    assert told == later(store, 8)
    before = {name: store.storage.read(name) for name in names(store)}
    told = later(store, 16, dry_run=True)
    assert {name: store.storage.read(name) for name in names(store)} == before
    assert told == later(store, 16)
    assert len(told.freed) > 10


def test_what_another_version_still_has_stays(store):
    store.publish(DATASET, lambda current: Manifest(current.plan_digest, current.plan, current.columns[:2]))
    kept = store.dataset(DATASET).manifest
    drop(store, 1)
    later(store, 8)
    later(store, 16)
    spared = {name.split("/")[1] for name in names(store, "parts")}
    assert kept.part_digests() <= spared
    assert len(spared) - len(kept.part_digests()) == 4  # of the block that thresholds are settled on
    assert verify(store).faults == ()


def test_young_objects_stay_whatever_refers_to_them(store):
    drop(store)
    found = later(store, 6)
    assert (found.sentenced, found.freed) == ([], [])


def test_an_uncommitted_part_is_freed_when_it_is_old(store):
    stray = stage("text", {"x": ArrayToStore(np.ones(3))}, {})
    upload(store.storage, stray)
    assert later(store, 6).sentenced == []
    assert later(store, 8).sentenced == [f"parts/{stray.digest}"]
    assert later(store, 16).freed == [f"parts/{stray.digest}"]
    assert not names(store, f"parts/{stray.digest}")


def test_half_written_files_are_swept(store):
    half = Path(store.storage.url) / "tmp" / "half"
    half.parent.mkdir(exist_ok=True)
    half.write_bytes(b"half a f")
    collect(store, 0)
    assert half.exists()  # its writer may be at work
    old = time.time() - DAY
    os.utime(half, (old, old))
    collect(store, 0)
    assert not half.exists()


def test_a_recipe_whose_part_is_gone_does_not_remain(store):
    """Action records that outlive their blobs break builds."""
    version = store.dataset(DATASET).manifest
    drop(store)
    lost = version.columns[-1].cells[0].part
    for name in names(store, f"parts/{lost}"):
        store.storage.delete(name)
    later(store, 8)
    assert names(store, "recipes") == set()


# Roots


def test_a_pinned_manifest_is_kept_and_opened_by_its_pin(store):
    (record,) = versions.kept_versions(store.storage, DATASET)
    before = names(store)
    pin = pins.pin(store.storage, record)
    drop(store)
    later(store, 8)
    later(store, 16)
    assert before <= names(store)
    assert store.dataset(DATASET, pin=record.identity[:12]).manifest.identity == record.identity
    pins.unpin(store.storage, pin)
    later(store, 8)
    assert later(store, 16).freed


def test_what_a_live_worker_may_find_is_kept(store):
    plan = store.dataset(DATASET).manifest.plan_digest
    before = names(store, "parts", "recipes", "plans", "assets")
    drop(store)
    with alive(store.storage, plan):
        for _ in range(3):
            collect(store, 0)
        assert names(store, "parts", "recipes", "plans", "assets") == before
    assert names(store, "heartbeats") == set()
    collect(store, 0)
    assert names(store, "recipes") != before


def test_what_was_stored_since_a_live_worker_began_is_kept(store):
    """Also what no plan leads to yet: its writer is still reading its corpus."""
    with alive(store.storage):
        part = stage("text", {"x": ArrayToStore(np.ones(3))}, {})
        answer = store.commit_part({"kind": "text", "version": "1", "block": "ab" * 32}, part, {}, {})
        for _ in range(3):
            collect(store, 0)
        assert names(store, f"parts/{answer.part}")
        assert len(names(store, "recipes")) > 1
    collect(store, 0)
    assert collect(store, 0).freed == [f"parts/{answer.part}"]


def test_a_dead_workers_sign_of_life_expires(store):
    with alive(store.storage, store.dataset(DATASET).manifest.plan_digest):
        (name,) = names(store, "heartbeats")
        left = store.storage.read(name)
    store.storage.write(name, left)  # as a kill leaves it
    drop(store)
    assert collect(store, 0).sentenced == []
    found = later(store, 0.1, 0)
    assert found.num_swept == 1
    assert found.sentenced != []
    assert names(store, "heartbeats") == set()


def test_heartbeats_go_on_while_the_body_runs(store, monkeypatch):
    monkeypatch.setattr(heartbeats, "BEAT_SECONDS", 0.01)
    beats = threading.Semaphore(0)
    write = type(store.storage).write

    def counting(self, name, data):
        write(self, name, data)
        if name.startswith("heartbeats/"):
            beats.release()

    monkeypatch.setattr(type(store.storage), "write", counting)
    with alive(store.storage):
        for _ in range(6):
            assert beats.acquire(timeout=30)
    assert names(store, "heartbeats") == set()


def test_the_block_that_thresholds_are_settled_on_is_kept(store):
    """The plan of a grown corpus may have it no more, and every later run needs its tokens."""
    manifest = store.dataset(DATASET).manifest
    calibration = manifest.plan.settings.calibration_block
    blocks = [block for block in manifest.plan.blocks if block.digest != calibration]
    grown = store.put_plan(Plan(manifest.plan.settings, tuple(blocks), manifest.plan.sources))
    store.publish(DATASET, lambda current: next_manifest(store, current, grown, {}))
    drop(store, 1)
    later(store, 8)
    later(store, 16)
    text = find_answer(store.storage, {"kind": "text", "version": "1", "block": calibration})
    assert text is not None
    assert store.part(text.part).damage() == []


# Second looks


def test_what_is_referred_to_again_is_reprieved_with_its_recipes(store):
    before = {name: store.storage.read(name) for name in names(store, "recipes", "parts")}
    record = next(versions.kept_versions(store.storage, DATASET))
    drop(store)
    sentenced = later(store, 8).sentenced
    versions.create_version(store.storage, "again", 1, record.manifest, record.identity)
    again = later(store, 16)
    assert sorted(again.reprieved) == sorted(sentenced)
    assert again.freed == []
    assert {name: store.storage.read(name) for name in names(store, "recipes", "parts")} == before
    assert names(store, "gc") == set()
    assert verify(store).faults == ()


def test_a_publisher_never_refers_to_a_part_that_is_being_freed(store):
    manifest = store.dataset(DATASET).manifest
    drop(store)
    later(store, 8)
    with pytest.raises(FreedError, match="being freed by a garbage collection"):
        store.publish("again", lambda current: manifest)
    later(store, 16)
    with pytest.raises((FreedError, DamageError)):
        store.publish("again", lambda current: manifest)
    assert store.datasets() == {}


def test_a_part_that_is_being_freed_is_committed_under_another_name(store):
    """Its objects would be deleted by the collection that has sentenced it."""
    part = stage("text", {"x": ArrayToStore(np.ones(3))}, {})
    recipe = {"kind": "text", "version": "1", "block": "ab" * 32}
    first = store.commit_part(recipe, part, {}, {})
    assert f"parts/{first.part}" in later(store, 8).sentenced
    second = store.commit_part(recipe, part, {}, {})
    assert second.part != first.part
    assert second.content == first.content
    later(store, 0, 7)
    assert store.part(second.part).damage() == []
    assert store.answer(recipe) == second


def test_a_killed_collection_is_finished_by_the_next(store, monkeypatch):
    """Killed before each of its deletions in turn; no recipe ever leads to a part that is not whole."""
    drop(store)
    monkeypatch.setattr(garbage, "map_threads", map)  # a kill leaves no threads that go on
    delete, num_kills = type(store.storage).delete, 0
    for days in (8, 16):
        for step in (0, 1, 2, 5, 30):
            left = [step]

            def deleting(self, name, left=left):
                if name != "collecting.json":
                    left[0] -= 1
                    if left[0] < 0:
                        raise KeyboardInterrupt
                delete(self, name)

            with monkeypatch.context() as patch:
                patch.setattr(type(store.storage), "delete", deleting)
                with suppress(KeyboardInterrupt):
                    later(store, days)
            num_kills += left[0] < 0
            assert_no_recipe_outlived_its_part(store)
        later(store, days)
    assert num_kills >= 8
    later(store, 24)
    assert {name.split("/")[0] for name in names(store)} == {"store.json", "datasets"}


def assert_no_recipe_outlived_its_part(store: Store) -> None:
    for name in names(store, "recipes"):
        result = open_record(store.storage.read(name), name)["result"]
        if "part" in result:
            assert store.part(result["part"]).damage() == []


def test_a_part_whose_deletion_was_interrupted_is_not_reprieved(store):
    """A live worker's plan leads to it by the recipe in its sentence, but its seal is gone already."""
    manifest = store.dataset(DATASET).manifest
    drop(store)
    later(store, 8)
    part = manifest.columns[-1].cells[0].part
    store.storage.delete(f"parts/{part}/seal.json")
    with alive(store.storage, manifest.plan_digest):
        found = later(store, 0)
    assert found.freed == [f"parts/{part}"]
    assert len(found.reprieved) > 10
    assert_no_recipe_outlived_its_part(store)
    assert names(store, f"parts/{part}") == set()


def test_unreadable_roots_stop_a_collection(store):
    (path,) = names(store, "manifests")
    stray = stage("text", {"x": ArrayToStore(np.ones(3))}, {})
    upload(store.storage, stray)
    before = names(store)
    for name in (path, *names(store, "plans"), f"datasets/{DATASET}/1.json"):
        data = store.storage.read(name)
        store.storage.write(name, data[:-3])
        with pytest.raises(DamageError, match=name):
            later(store, 8)
        store.storage.write(name, data)
    assert names(store) == before


def test_two_collections_at_once_are_refused(store):
    store.storage.create("collecting.json", b"{}")
    with pytest.raises(StoreError, match="another collection is at work"):
        collect(store, 0)


def test_a_killed_collections_lock_is_ignored_after_an_hour(store, monkeypatch):
    store.storage.create("collecting.json", b"{}")
    monkeypatch.setattr(garbage, "LIVE_SECONDS", -1.0)
    collect(store, 7 * DAY)
    assert not store.storage.exists("collecting.json")


# Races


@pytest.mark.parametrize("seed", range(3))
def test_workers_that_race_collections_without_grace_lose_nothing(store, seed):
    """Workers find or make, publish and drop datasets of the same parts, while collections without grace free them.

    Between two runs they rest, or nothing would ever be collected beside a live worker.
    """
    original = store.dataset(DATASET).manifest
    staged = dict(whole_parts(store))
    stop = threading.Event()

    def work(number: int) -> list[str]:
        own, luck, outcomes = Store.open(store.storage.url), random.Random(seed * 100 + number), []
        for _ in range(8):
            time.sleep(luck.uniform(0, 0.8))
            name = f"w{number}"
            try:
                with alive(own.storage, original.plan_digest):
                    freeing.tried_again(lambda name=name: remake(own, name, original, staged, luck))
                outcomes.append("published")
            except FreedError:
                outcomes.append("refused")
                continue
            assert_whole(own, name)
            drop(own, name=name)
        return outcomes

    def collect_on() -> list[Collected]:
        own, done = Store.open(store.storage.url), []
        while not stop.is_set():
            done.append(collect(own, 0.0))
        return done

    drop(store)
    with ThreadPoolExecutor(3) as pool:
        collecting = pool.submit(collect_on)
        working = [pool.submit(work, number) for number in range(2)]
        try:
            outcomes = [outcome for future in working for outcome in future.result(timeout=200)]
        finally:
            stop.set()
        rounds = collecting.result()
    print(outcomes, len(rounds), [(len(r.sentenced), len(r.freed), len(r.reprieved)) for r in rounds])
    assert outcomes.count("published") >= 10
    assert sum(len(done.freed) for done in rounds) > 0
    assert verify(store).faults == ()


def whole_parts(store: Store):
    """(name of the record, its body, the part as it was staged) of everything stored."""
    for name in sorted(names(store, "recipes")):
        record = open_record(store.storage.read(name), name)
        if "part" not in record["result"]:
            continue
        folder = f"parts/{record['result']['part']}/"
        objects = {path.removeprefix(folder): store.storage.read(path) for path in names(store, folder.rstrip("/"))}
        seal = objects.pop("seal.json")
        staged = StagedPart(record["result"]["part"], record["result"]["content"], objects, seal)
        yield name, (record["recipe"], staged, record["stats"])


def remake(store: Store, name: str, original: Manifest, staged, luck: random.Random) -> None:
    """What a producer does: find or make every answer, then publish what is found."""
    plan = store.put_plan(original.plan)
    for recipe, part, stats in staged.values():
        if store.answer(recipe) is None:
            store.commit_part(recipe, part, {k: v for k, v in stats.items() if not k.startswith("bytes.")}, {})
        if luck.random() < 0.1:
            time.sleep(luck.uniform(0, 0.02))
    requested = {column.id: (column.template, column.label) for column in original.columns}
    manifest = next_manifest(store, None, plan, requested)
    if any(column.num_holes for column in manifest.columns):
        raise FreedError("an answer was collected between being found and being published")
    time.sleep(luck.uniform(0, 0.05))
    store.publish(name, lambda current: manifest)


def assert_whole(store: Store, name: str) -> None:
    for part in store.dataset(name).manifest.part_digests():
        assert store.part(part).damage() == []
