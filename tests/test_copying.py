"""Copies: only what a dataset reaches, checked on the way, resumed after any kill, and never over another's dataset."""

from __future__ import annotations

import random
from dataclasses import replace
from uuid import uuid4

import pytest
from buckets import faulty_s3
from stores import DATASET, fill_store

from logitstore import versions
from logitstore.copying import Copied, copy_dataset
from logitstore.errors import DamageError, FreedError, StoreError
from logitstore.freeing import Sentence, pass_sentence
from logitstore.garbage import collect
from logitstore.storage import LocalStorage
from logitstore.store import Store
from logitstore.verification import verify


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A store with two datasets; all of the second is part of the first."""
    store, version = fill_store(str(tmp_path_factory.mktemp("stores") / "store"), tmp_path_factory.mktemp("inputs"))
    store.publish("text", lambda current: replace(version.manifest, columns=version.manifest.columns[:1]))
    return store


@pytest.fixture(params=["folder", "memory", "s3"])
def destination(request, tmp_path):
    match request.param:
        case "folder":
            return Store.open_or_create(str(tmp_path / "copy"))
        case "memory":
            return Store.open_or_create(f"memory://{uuid4().hex}")
    request.getfixturevalue("bucket")
    return Store.open_or_create(f"s3://bucket/{uuid4().hex}")


@pytest.fixture(scope="module")
def bucket():
    with faulty_s3():
        yield


@pytest.fixture
def folder(tmp_path):
    return Store.open_or_create(str(tmp_path / "copy"))


def copied(origin: Store, destination: Store, dataset: str = DATASET, number: int = 1, **options) -> Copied:
    return copy_dataset(origin, destination, versions.find_version(origin.storage, dataset, number), **options)


def objects(store: Store) -> dict[str, bytes]:
    kept = (name for name in store.storage.list("") if not name.startswith(("datasets/", "tmp/")))
    return {name: store.storage.read(name) for name in kept}


def test_a_copy_is_whole_and_the_same_to_the_byte(origin, destination):
    told = []
    done = copied(origin, destination, progress=lambda done, total: told.append((done, total)))
    assert done.number == {DATASET: 1}
    assert verify(destination).faults == ()
    there, here = objects(destination), objects(origin)
    # All there is, but for the manifest of the other dataset and its plan's other names.
    assert {name: here[name] for name in there} == there
    assert {name.split("/")[0] for name in here.keys() - there.keys()} <= {"manifests"}
    assert destination.dataset(DATASET).manifest.identity == origin.dataset(DATASET).manifest.identity
    assert told[-1][0] == told[-1][1] > 0
    again = copied(origin, destination)
    assert (again.number, again.num_objects, again.num_bytes) == ({DATASET: 1}, 0, 0)
    back = Store.open_or_create(f"memory://{uuid4().hex}")
    copied(destination, back)
    assert objects(back) == there


def test_only_what_the_dataset_reaches_is_copied(origin, folder):
    copied(origin, folder, "text")
    manifest = origin.dataset("text").manifest
    parts = {name.split("/")[1] for name in folder.storage.list("parts")}
    assert parts >= manifest.part_digests()
    assert len(parts) < len(origin.dataset(DATASET).manifest.part_digests())
    done = copied(origin, folder)
    assert done.num_skipped >= len(manifest.part_digests())
    assert verify(folder).faults == ()
    assert folder.datasets() == {DATASET: 1, "text": 1}


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_copy_goes_on(origin, folder, monkeypatch, seed):
    """Killed before random writes; nothing half is ever published, and nothing is written twice but what was half."""
    luck, place, kills = random.Random(seed), LocalStorage._place, 0
    while True:
        left = [luck.randrange(1, 60)]

        def placing(self, name, data, move, left=left):
            left[0] -= 1
            if left[0] < 0 and "heartbeats" not in name:
                raise KeyboardInterrupt
            place(self, name, data, move)

        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, "_place", placing)
            try:
                copied(origin, folder)
                break
            except KeyboardInterrupt:
                kills += 1
        assert folder.datasets() == {}
        assert verify(folder).faults == ()
    assert kills >= 2
    assert verify(folder).faults == ()
    assert folder.dataset(DATASET).manifest.identity == origin.dataset(DATASET).manifest.identity
    collect(folder, 0)
    assert verify(folder).num_uncommitted == 0


def test_damage_of_the_source_stops_a_copy(origin, folder, tmp_path):
    spoilt = Store.open_or_create(str(tmp_path / "spoilt"))
    copied(origin, spoilt)
    part = origin.dataset(DATASET).manifest.columns[-1].cells[0].part
    name = next(name for name in spoilt.storage.list(f"parts/{part}") if "/c/" in name)
    data = spoilt.storage.read(name)
    for harm in (lambda: spoilt.storage.write(name, data[:-1] + b"x"), lambda: spoilt.storage.delete(name)):
        harm()
        with pytest.raises(DamageError, match=name):
            copied(spoilt, folder)
        assert folder.datasets() == {}
        assert verify(folder).faults == ()
    spoilt.storage.write(name, data)
    assert copied(spoilt, folder).number == {DATASET: 1}
    assert verify(folder).faults == ()


def test_a_later_version_becomes_the_next_one(origin, folder, tmp_path):
    source = Store.open_or_create(str(tmp_path / "source"))
    copied(origin, source)
    copied(source, folder)
    source.publish(DATASET, lambda current: replace(current, columns=current.columns[:2]))
    versions.drop_version(source.storage, versions.read_version(source.storage, DATASET, 1))
    assert copied(source, folder, number=2).number == {DATASET: 2}
    assert folder.dataset(DATASET, 2).manifest.identity == source.dataset(DATASET).manifest.identity
    assert copied(source, folder, number=2).num_objects == 0
    assert folder.datasets() == {DATASET: 2}


def test_another_dataset_of_the_name_is_refused(origin, folder):
    folder.publish(DATASET, lambda current: replace(origin.dataset("text").manifest, columns=()))
    before = objects(folder)
    with pytest.raises(StoreError, match=r"has another dataset 'demo'.*copy under another name with --as"):
        copied(origin, folder)
    assert objects(folder) == before
    assert copied(origin, folder, name="other").number == {"other": 1}
    assert folder.datasets() == {DATASET: 1, "other": 1}


def test_what_the_destination_is_freeing_is_not_relied_on(origin, folder, monkeypatch):
    copied(origin, folder)
    versions.drop_version(folder.storage, versions.read_version(folder.storage, DATASET, 1))
    part = origin.dataset(DATASET).manifest.columns[0].cells[0].part
    pass_sentence(folder.storage, Sentence(f"parts/{part}", 0.0, {}))
    monkeypatch.setattr("logitstore.freeing._WAIT_SECONDS", (0.0,))
    with pytest.raises(FreedError, match="run `logitstore gc`, then the same command again"):
        copied(origin, folder)
    collect(folder)
    assert copied(origin, folder).number == {DATASET: 2}  # the number of the dropped version stays its own
    assert verify(folder).faults == ()
