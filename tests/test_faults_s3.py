"""S3 through a network that fails: a real client, a real server, and every fault that a proxy between them can make."""

from __future__ import annotations

import itertools

import pytest
from buckets import faulty_s3, new_url
from fault_proxy import delay, lose_answer, lose_request, overlook, refuse, stall, trickle, truncate

from logitstore.errors import StorageError, StoreError
from logitstore.recipes import Answer, commit_answer, find_answer, recipe_path
from logitstore.storage import open_storage, remote, retries
from logitstore.store import Store

PRECONDITION = refuse(412, "PreconditionFailed", "<Condition>If-None-Match</Condition>")
RECIPE = {"kind": "text", "block": "b"}
MINE = Answer({"part": "p1", "content": "c1"}, {"num_rows": 1})


@pytest.fixture(scope="module")
def server():
    with faulty_s3() as proxy:
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
    storage = open_storage(new_url())
    storage.write("there", bytes(range(256)) * 40)
    proxy.requests.clear()
    return storage


OPERATIONS = {
    "read": lambda storage: storage.read("there"),
    "read_range": lambda storage: storage.read_range("there", 100, 5000),
    "write": lambda storage: storage.write("there", bytes(range(256)) * 40),
    "create": lambda storage: storage.create("new", b"data"),
    "entry": lambda storage: storage.entry("there").num_bytes,
    "list": lambda storage: list(storage.list("")),
    "delete": lambda storage: storage.delete("there"),
}
REFUSALS = {
    "503": refuse(503, "SlowDown"),
    "503 without words": refuse(503, ""),
    "500": refuse(500, "InternalError"),
    "429": refuse(429, "TooManyRequests"),
    "409": refuse(409, "ConditionalRequestConflict"),
    "400 of the transfer": refuse(400, "RequestTimeout"),
    "lost request": lose_request,
}


# The answer to a HEAD has no body to say why it is a 400.
PAIRS = [pair for pair in itertools.product(OPERATIONS, REFUSALS) if pair != ("entry", "400 of the transfer")]


@pytest.mark.parametrize(("operation", "refusal"), PAIRS)
def test_refused_requests_are_sent_again_and_by_one_layer_only(proxy, operation, refusal):
    operation, fault = OPERATIONS[operation], REFUSALS[refusal]
    undisturbed, storage = (open_storage(new_url()) for _ in range(2))
    for each in (undisturbed, storage):
        each.write("there", bytes(range(256)) * 40)
    expected = operation(undisturbed)
    proxy.requests.clear()
    operation(undisturbed)
    usual = len(proxy.requests)
    proxy.requests.clear()
    proxy.inject(fault, times=2)
    assert operation(storage) == expected
    assert proxy.num_waiting == 0
    assert len(proxy.requests) == usual + 2


def test_storm_of_503_is_waited_out(proxy, storage):
    proxy.inject(REFUSALS["503"], times=12)
    assert storage.create("recipe", b"data")
    assert proxy.count("PUT", "recipe") == 13


def test_lasting_refusal_is_an_error_that_names_no_secret(proxy, storage, monkeypatch):
    monkeypatch.setattr(retries, "RETRY_SECONDS", 0.3)
    proxy.inject(REFUSALS["503"], times=10_000)
    with pytest.raises(StorageError, match=r"there: gave up after 0 s: .*SlowDown") as caught:
        storage.read("there")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("code", ["AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"])
def test_forbidden_is_said_at_once(proxy, storage, code):
    for operation in (OPERATIONS["read"], OPERATIONS["write"], OPERATIONS["create"], OPERATIONS["list"]):
        proxy.reset()
        proxy.inject(refuse(403, code), times=100)
        with pytest.raises(StorageError, match="refused"):
            operation(storage)
        assert len(proxy.requests) == 1


def test_bucket_that_is_not_there_is_said_at_once(proxy):
    storage = open_storage("s3://no-such-bucket/store")
    for operation in (OPERATIONS["write"], OPERATIONS["create"]):
        proxy.reset()
        with pytest.raises(StorageError, match="no-such-bucket"):
            operation(storage)
        assert len(proxy.requests) == 1


@pytest.mark.parametrize("operation", ["read", "read_range", "list"])
@pytest.mark.parametrize("fault", [truncate, stall(3), trickle(0.05)], ids=["truncated", "stalled", "trickling"])
def test_body_that_does_not_come_is_asked_for_again(proxy, storage, operation, fault, monkeypatch):
    monkeypatch.setattr(remote, "ATTEMPT_SECONDS", 1.5)
    monkeypatch.setattr(remote, "_SLOWEST_BYTES_PER_SECOND", 1 << 30)
    expected = OPERATIONS[operation](storage)
    proxy.requests.clear()
    proxy.inject(fault, "GET")
    assert OPERATIONS[operation](storage) == expected
    assert len(proxy.requests) == 2


def test_answer_that_does_not_come_is_asked_for_again(proxy, storage):
    for name, operation in OPERATIONS.items():
        proxy.reset()
        proxy.inject(delay(2.5))
        before = len(proxy.requests)
        operation(storage)
        assert len(proxy.requests) >= before + 2, name


def test_latency_is_borne(proxy, storage):
    proxy.inject(delay(0.2), times=20)
    assert storage.create("recipe", b"1")
    assert storage.read("recipe") == b"1"
    assert len(proxy.requests) == 2


# Creates


@pytest.mark.parametrize("words", ["<Condition>If-None-Match</Condition>", ""], ids=["AWS", "others"])
def test_refused_condition_means_taken_in_whatever_words(proxy, storage, words):
    proxy.inject(refuse(412, "PreconditionFailed", words), "PUT")
    assert not storage.create("recipe", b"1")
    assert len(proxy.requests) == 1


def test_conflict_with_a_create_under_way_is_tried_again(proxy, storage):
    """S3 answers 409 while another conditional PUT of the name is under way: neither taken nor free."""
    proxy.inject(refuse(409, "ConditionalRequestConflict"), "PUT", times=3)
    assert storage.create("recipe", b"1")
    proxy.inject(refuse(409, "ConditionalRequestConflict"), "PUT", times=3)
    assert not storage.create("recipe", b"2")
    assert storage.read("recipe") == b"1"


def test_commit_whose_answer_was_lost_finds_its_own_write(proxy, storage):
    proxy.inject(lose_answer, "PUT", "recipes/")
    assert commit_answer(storage, RECIPE, MINE, {}) == MINE
    assert proxy.count("PUT", "recipes/") == 2
    assert find_answer(storage, RECIPE) == MINE
    other = Answer({"part": "p2", "content": "c2"}, {})
    assert commit_answer(storage, RECIPE, other, {}) == MINE


def test_commit_that_lost_its_answer_and_the_race_takes_the_winners(proxy, storage):
    """The first attempt was refused, unheard; the second is refused too, and what is there is another's."""
    winner = Answer({"part": "p2", "content": "c2"}, {})
    assert commit_answer(storage, RECIPE, winner, {}) == winner
    proxy.inject(lose_answer, "PUT", "recipes/")
    assert commit_answer(storage, RECIPE, MINE, {}) == winner


def test_answer_deleted_between_create_and_read_is_created_again(proxy, storage, monkeypatch):
    commit_answer(storage, RECIPE, Answer({"part": "old", "content": "c"}, {}), {})
    create = type(storage).create

    def create_then_lose(self, name, data):
        created = create(self, name, data)
        if not created:
            self.delete(name)
        return created

    monkeypatch.setattr(type(storage), "create", create_then_lose)
    assert commit_answer(storage, RECIPE, MINE, {}) == MINE
    assert storage.read(recipe_path(RECIPE))


# Stores


def test_server_that_overlooks_conditions_is_refused(proxy):
    """Creates that overwrite would let racing workers mix their work: say so before anybody works."""
    proxy.inject(overlook("If-None-Match"), "PUT", times=1000)
    with pytest.raises(StoreError, match="overwrites objects that it was asked to create only if absent"):
        Store.open_or_create(new_url())


@pytest.mark.parametrize("skip", range(4))
@pytest.mark.parametrize("fault", [lose_answer, lose_request, REFUSALS["503"], REFUSALS["409"]])
def test_store_is_made_and_probed_in_spite_of_any_fault(proxy, fault, skip):
    url = new_url()
    proxy.inject(fault, skip=skip, times=2)
    Store.open_or_create(url)
    proxy.reset()
    assert Store.open_or_create(url).datasets() == {}


def test_ranges_are_read_by_the_faster_client_and_by_the_other_where_it_fails(proxy, storage):
    """Both give the same; the credentials and the endpoint are the same."""
    pytest.importorskip("obstore")
    whole = storage.read("there")
    proxy.requests.clear()
    assert storage.read_range("there", 5, 700) == whole[5:700]
    proxy.inject(refuse(403, "AccessDenied"))
    assert storage.read_range("there", 5, 700) == whole[5:700]
    agents = [request.headers.get("user-agent") or request.headers["User-Agent"] for request in proxy.requests]
    assert ["object_store" in agent for agent in agents] == [True, True, False]


def test_reads_of_a_store_take_one_request_each(proxy, storage):
    storage.read("there")
    storage.read_range("there", 0, 100)
    assert len(proxy.requests) == 2


def test_pauses_have_full_jitter(proxy, storage, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(retries.time, "sleep", pauses.append)
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.2)
    monkeypatch.setattr(retries, "LONGEST_PAUSE", 20.0)
    monkeypatch.setattr(retries, "RETRY_SECONDS", 180.0)
    proxy.inject(REFUSALS["503"], times=8)
    storage.read("there")
    bounds = [min(0.2 * 2**number, 20.0) for number in range(8)]
    assert all(0 <= pause <= bound for pause, bound in zip(pauses, bounds, strict=True))
    assert len(set(pauses)) == 8
