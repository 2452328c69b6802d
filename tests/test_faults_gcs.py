"""Google Cloud Storage: gcsfs against a stub that honours preconditions, through a network that fails."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from buckets import faulty_gcs, new_url
from fault_proxy import delay, lose_answer, lose_request, overlook_query, refuse, stall, truncate

from logitstore.errors import DamageError, StorageError, StoreError
from logitstore.recipes import Answer, commit_answer, find_answer
from logitstore.storage import open_storage, retries
from logitstore.store import Store

RECIPE = {"kind": "text", "block": "b"}
MINE = Answer({"part": "p1", "content": "c1"}, {"num_rows": 1})


@pytest.fixture(scope="module")
def server():
    with faulty_gcs() as proxy:
        yield proxy


@pytest.fixture
def proxy(server, monkeypatch):
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(retries, "LONGEST_PAUSE", 0.02)
    monkeypatch.setattr(retries, "RETRY_SECONDS", 20.0)
    server.reset()
    yield server
    server.reset()


@pytest.fixture
def storage(proxy):
    storage = open_storage(new_url("gs://bucket"))
    storage.write("there", bytes(range(256)) * 40)
    proxy.requests.clear()
    return storage


def test_objects_are_kept_listed_and_deleted(storage):
    for name, data in (("a/1", b"one\r\n--==0==-\n"), ("a/b/2", b""), ("ab/3 #%é?", b"\r\n")):
        storage.write(name, data)
        assert storage.read(name) == data
        assert storage.entry(name).num_bytes == len(data)
    assert set(storage.list("a")) == {"a/1", "a/b/2"}
    assert set(storage.list("")) == {"a/1", "a/b/2", "ab/3 #%é?", "there"}
    assert abs(storage.entry("a/1").modified - next(storage.list_entries("a")).modified) < 60
    for name in ("a/1", "a/1", "nothing"):
        storage.delete(name)
    assert not storage.exists("a/1")
    assert not storage.exists("a")
    with pytest.raises(FileNotFoundError):
        storage.read("a/1")


def test_ranges_are_read_and_missed(storage):
    assert storage.read_range("there", 250, 260) == bytes([*range(250, 256), *range(4)])
    for begin, end in ((10_000, 10_300), (20_000, 20_001)):
        with pytest.raises(DamageError, match="there: bytes"):
            storage.read_range("there", begin, end)


def test_create_twice_keeps_the_first(storage):
    assert storage.create("r", b"first")
    assert not storage.create("r", b"second")
    assert storage.read("r") == b"first"


def test_racing_creates_have_one_winner_each(proxy):
    url, barrier = new_url("gs://bucket"), threading.Barrier(8)

    def work(worker: int) -> list[bool]:
        own = open_storage(url)
        barrier.wait()
        return [own.create(f"recipes/{name}", b"%d" % worker) for name in range(20)]

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(work, range(8)))
    for name in range(20):
        winners = [worker for worker in range(8) if won[worker][name]]
        assert open_storage(url).read(f"recipes/{name}") == b"%d" % winners[0]
        assert len(winners) == 1


OPERATIONS = {
    "read": lambda storage: storage.read("there"),
    "read_range": lambda storage: storage.read_range("there", 100, 5000),
    "write": lambda storage: storage.write("there", bytes(range(256)) * 40),
    "create": lambda storage: storage.create("new", b"data"),
}


@pytest.mark.parametrize("fault", [refuse(503, ""), refuse(429, ""), refuse(500, ""), refuse(409, ""), lose_request])
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_refused_requests_are_sent_again_and_by_one_layer_only(proxy, storage, operation, fault):
    expected = operation(open_storage(storage.url)) if operation is not OPERATIONS["create"] else True
    proxy.requests.clear()
    proxy.inject(fault, times=7)  # more than gcsfs's own six
    assert operation(storage) == expected
    assert len(proxy.requests) == 8


@pytest.mark.parametrize("status", [400, 401, 403])
def test_final_refusal_is_said_at_once(proxy, storage, status):
    proxy.inject(refuse(status, "Denied"), times=100)
    for operation in OPERATIONS.values():
        proxy.requests.clear()
        with pytest.raises(StorageError, match="refused"):
            operation(storage)
        assert len(proxy.requests) == 1


@pytest.mark.parametrize("operation", ["read", "read_range"])
@pytest.mark.parametrize("fault", [truncate, stall(3), delay(3)], ids=["truncated", "stalled", "late"])
def test_body_that_does_not_come_is_asked_for_again(proxy, storage, operation, fault):
    expected = OPERATIONS[operation](storage)
    proxy.requests.clear()
    proxy.inject(fault, "GET")
    assert OPERATIONS[operation](storage) == expected
    assert len(proxy.requests) == 2


def test_commit_whose_answer_was_lost_finds_its_own_write(proxy, storage):
    proxy.inject(lose_answer, "POST")
    assert commit_answer(storage, RECIPE, MINE, {}) == MINE
    assert proxy.count("POST") == 2
    assert find_answer(storage, RECIPE) == MINE
    other = Answer({"part": "p2", "content": "c2"}, {})
    proxy.inject(lose_answer, "POST")
    assert commit_answer(storage, RECIPE, other, {}) == MINE


def test_server_that_overlooks_conditions_is_refused(proxy):
    proxy.inject(overlook_query("ifGenerationMatch"), "POST", times=1000)
    with pytest.raises(StoreError, match="overwrites objects that it was asked to create only if absent"):
        Store.open_or_create(new_url("gs://bucket"))


def test_bucket_serves_a_store(proxy):
    url = new_url("gs://bucket")
    store = Store.open_or_create(url)
    digest = store.put_asset(b"asset")
    assert Store.open(url).asset(digest) == b"asset"
