"""Versions by number and by digest: dropped numbers stay taken, pins refuse all others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest

from logitstore import pins, versions
from logitstore.errors import StoreError
from logitstore.manifest import Column, Manifest
from logitstore.plan import Plan, PlanBlock, PlanSettings
from logitstore.store import Store

PLAN = Plan(PlanSettings(4096, 0), (PlanBlock("aa" * 32, "train", 1, 5, (1,), (0,)),), ("a",))


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    """Versions 1 to 3 of a dataset, with one to three columns."""
    store = Store.open_or_create(str(tmp_path / "s") if request.param == "folder" else f"memory://{uuid4().hex}")
    for number in range(3):
        add(store, number)
    return store


def add(store: Store, number: int) -> int:
    plan = store.put_plan(PLAN)
    column = Column({"kind": "tokens", "tokenizer": f"{number}"}, f"{number}", (None,))
    return store.publish("d", lambda current: (current or Manifest(plan, PLAN, ())).with_columns([column])).number


def drop(store: Store, *numbers: int) -> None:
    for number in numbers:
        versions.drop_version(store.storage, versions.find_version(store.storage, "d", number))


def identity(store: Store, number: int) -> str:
    return versions.read_version(store.storage, "d", number).identity


def test_dropped_versions_are_refused_by_their_number(store):
    drop(store, 2)
    assert store.dataset("d").number == 3
    with pytest.raises(StoreError, match="version 2 of dataset 'd' was dropped on 2"):
        store.dataset("d", 2)
    assert len(store.dataset("d", 1).manifest.columns) == 1


def test_numbers_of_dropped_versions_are_never_used_again(store):
    drop(store, 3)
    assert store.datasets() == {"d": 2}
    assert add(store, 7) == 4
    assert len(store.dataset("d").manifest.columns) == 3  # those of version 2, and the new one
    drop(store, 1, 2, 4)
    assert store.datasets() == {}
    with pytest.raises(StoreError, match="no dataset 'd'; there are: none yet"):
        store.dataset("d")
    assert add(store, 0) == 5
    assert len(store.dataset("d").manifest.columns) == 1


def test_publishers_that_race_drops_never_take_a_number_twice(store):
    """Every number is created once, whoever drops what meanwhile."""

    def publish_and_drop(worker: int) -> list[int]:
        numbers = []
        for turn in range(6):
            numbers.append(add(store, 10 + 10 * worker + turn))
            drop(store, numbers[-1])
        return numbers

    with ThreadPoolExecutor(4) as pool:
        taken = [number for numbers in pool.map(publish_and_drop, range(4)) for number in numbers]
    assert sorted(taken) == list(range(4, 28))
    assert store.datasets() == {"d": 3}


def test_a_pin_finds_the_version_with_its_digest(store):
    for number in (1, 2, 3):
        assert store.dataset("d", pin=identity(store, number)).number == number
        assert store.dataset("d", pin=identity(store, number)[:8].upper()).number == number
        assert store.dataset("d", number, pin=identity(store, number)).number == number


def test_a_pin_refuses_other_versions(store):
    with pytest.raises(StoreError, match=r"no version with manifest 0{64}; its newest, version 3, has "):
        store.dataset("d", pin="0" * 64)
    with pytest.raises(StoreError, match=f"version 1 of dataset 'd' has manifest {identity(store, 1)}"):
        store.dataset("d", 1, pin=identity(store, 2))
    with pytest.raises(StoreError, match="at least 8 digits"):
        store.dataset("d", pin=identity(store, 1)[:7])


def test_a_pinned_version_opens_after_its_drop(store):
    pin = pins.pin(store.storage, versions.find_version(store.storage, "d", 2))
    assert pins.pin(store.storage, versions.find_version(store.storage, "d", 2)) == pin
    drop(store, 1, 2, 3)
    assert len(store.dataset("d", pin=pin.identity).manifest.columns) == 2
    with pytest.raises(StoreError, match="has no version with manifest"):
        store.dataset("d", pin=identity(store, 1))
    pins.unpin(store.storage, pin)
    assert pins.list_pins(store.storage) == []
    with pytest.raises(StoreError, match="has no version with manifest"):
        store.dataset("d", pin=pin.identity)
