"""Repair: exactly what is damaged is redone, or restored from a copy to the byte; and the rest is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from stores import DATASET, fill_store

from logitstore.dropped import dropped_parts
from logitstore.repair import repair
from logitstore.storage import open_storage
from logitstore.store import Store
from logitstore.verification import verify


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A whole store, and the inputs that it was made of."""
    store, inputs = tmp_path_factory.mktemp("stores") / "store", tmp_path_factory.mktemp("inputs")
    fill_store(str(store), inputs)
    return store, inputs


@pytest.fixture
def copy(folders, tmp_path):
    shutil.copytree(folders[0], tmp_path / "copy")
    return Store.open(str(tmp_path / "copy"))


def contents(store: Store) -> dict[str, bytes]:
    return {name: store.storage.read(name) for name in sorted(store.storage.list(""))}


def flip(store: Store, name: str) -> None:
    data = store.storage.read(name)
    middle = len(data) // 2
    store.storage.write(name, data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])


def truncate(store: Store, name: str) -> None:
    store.storage.write(name, store.storage.read(name)[:-3])


def delete(store: Store, name: str) -> None:
    store.storage.delete(name)


def one_of_each(store: Store) -> list[str]:
    """An object of every kind that a store has, the objects of a part of every kind among them."""
    chosen: dict[str, str] = {}
    for column in store.dataset(DATASET).manifest.columns:
        part = column.cells[0].part
        for name in store.storage.list(f"parts/{part}"):
            chosen.setdefault(f"{column.kind}/{name.split('/', 2)[2]}", name)
    for name in sorted(store.storage.list("")):
        folder = name.split("/")[0]
        if folder != "parts" and (folder != "recipes" or b'"part"' in store.storage.read(name)):
            chosen.setdefault(folder, name)
    return sorted(chosen.values())


@pytest.mark.parametrize("harm", [flip, truncate, delete])
def test_what_is_restored_is_the_same_to_the_byte(copy, folders, harm):
    before = contents(copy)
    harmed = one_of_each(copy)
    assert len({name.split("/")[0] for name in harmed}) == 8  # all kinds
    for name in harmed:
        if harm is not delete or not name.startswith("datasets/"):  # nothing refers to a dataset's newest version
            harm(copy, name)
    found = verify(copy)
    repaired = repair(copy, found, open_storage(str(folders[0])))
    while repaired.restored != []:  # what was hidden behind a damaged manifest comes to light in a second look
        repaired = repair(copy, verify(copy), open_storage(str(folders[0])))
    assert repaired.dropped == []
    assert repaired.beyond == {}
    assert contents(copy) == before
    assert verify(copy).faults == ()


@pytest.mark.parametrize("harm", [flip, truncate, delete])
def test_what_is_dropped_is_exactly_what_is_redone(copy, folders, harm):
    """Every part of one block and the record of one other answer; then the run that made them all, again."""
    before = copy.dataset(DATASET).manifest
    harmed = [column.cells[1].part for column in before.columns]
    for part in harmed:
        harm(copy, sorted(name for name in copy.storage.list(f"parts/{part}") if "/c/" in name)[0])
    whole = {name: data for name, data in contents(copy).items() if not any(part in name for part in harmed)}
    repaired = repair(copy, verify(copy))
    assert sorted(repaired.dropped) == sorted(f"parts/{part}" for part in harmed)
    assert dropped_parts(copy.storage) == set(harmed)
    after_drop = contents(copy)
    assert not any(part in name for name in after_drop for part in harmed if not name.startswith("dropped/"))
    recipes = {name for name in whole if name.startswith("recipes/")}
    assert len(recipes - after_drop.keys()) == len(harmed)
    committed = []
    again = redo(copy, folders[1], committed)
    assert sorted(committed) == sorted(harmed)
    assert again.identity == before.identity
    assert verify(copy).faults == ()
    assert {name: contents(copy)[name] for name in whole if name not in recipes} == {
        name: data for name, data in whole.items() if name not in recipes
    }


def redo(store: Store, inputs: Path, committed: list[str]):
    """The run that made the store, told of every part that it commits."""
    commit = Store.commit_part

    def counting(self, recipe, *arguments):
        is_new = self.answer(recipe) is None
        answer = commit(self, recipe, *arguments)
        committed.extend([answer.part] * is_new)
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "commit_part", counting)
        return fill_store(store.storage.url, inputs)[1].manifest


@pytest.mark.parametrize("harm", [flip, delete])
def test_a_damaged_record_is_answered_again(copy, folders, harm):
    before = copy.dataset(DATASET).manifest
    name = next(n for n in one_of_each(copy) if n.startswith("recipes/"))
    harm(copy, name)
    repaired = repair(copy, verify(copy))
    assert repaired.dropped == [name]
    committed = []
    assert redo(copy, folders[1], committed).identity == before.identity
    assert len(committed) == 1
    assert verify(copy).faults == ()


@pytest.mark.parametrize("harm", [flip, truncate, delete])
def test_pages_are_made_again_from_the_seals(copy, harm):
    before = contents(copy)
    for name in copy.storage.list("pages"):
        harm(copy, name)
    repaired = repair(copy, verify(copy))
    assert repaired.beyond == {}
    assert contents(copy) == before


@pytest.mark.parametrize("folder", ["manifests", "plans", "assets"])
def test_what_cannot_be_made_again_is_named_with_what_to_do(copy, folder):
    name = next(iter(copy.storage.list(folder)))
    flip(copy, name)
    harmed = copy.storage.read(name)
    repaired = repair(copy, verify(copy))
    assert list(repaired.beyond) == [name]
    assert "verify --repair --from URL" in repaired.beyond[name]
    assert copy.storage.read(name) == harmed  # it may still be of use to somebody


@pytest.mark.parametrize("folder", ["plans", "assets"])
def test_the_same_run_mends_plans_and_assets(copy, folders, folder):
    before = copy.dataset(DATASET).manifest.identity
    for name in copy.storage.list(folder):
        flip(copy, name)
    repair(copy, verify(copy))
    if folder == "plans":
        copy.storage.delete(f"datasets/{DATASET}/1.json")  # whose plan cannot be read
    assert redo(copy, folders[1], []).identity == before
    assert verify(copy).faults == ()


def test_a_damaged_source_restores_nothing(copy, folders, tmp_path):
    """What it does not have whole is dropped instead."""
    shutil.copytree(folders[0], tmp_path / "source")
    source = Store.open(str(tmp_path / "source"))
    part = copy.dataset(DATASET).manifest.columns[-1].cells[0].part
    data = next(name for name in copy.storage.list(f"parts/{part}") if "/c/" in name)
    for store in (copy, source):
        flip(store, data)
    repaired = repair(copy, verify(copy), source.storage)
    assert (repaired.restored, repaired.dropped) == ([], [f"parts/{part}"])


def test_a_whole_store_is_left_alone(copy):
    before = contents(copy)
    repaired = repair(copy, verify(copy))
    assert (repaired.restored, repaired.dropped, repaired.beyond) == ([], [], {})
    assert contents(copy) == before
