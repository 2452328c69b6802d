"""Killed at every step: whichever operation is the last, what is there is whole, and the next run ends alike."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from buckets import faulty_s3, new_url
from builders import TEXTS, build_bytelevel_tokenizer
from fault_proxy import lose_answer, lose_request, refuse

from logitstore.columns import next_manifest
from logitstore.corpus_files import list_files
from logitstore.ingest import ingest
from logitstore.plan import PlanSettings
from logitstore.storage import Storage, open_storage, retries
from logitstore.store import Store
from logitstore.text_columns import TextColumns
from logitstore.tokenizer import Tokenizer
from logitstore.verification import verify

SETTINGS = PlanSettings.for_corpus(0, 0.15, 600)
EVERY = {"memory": 1, "folder": 9, "s3": 23}
"""Which steps are tried: all in memory, and where they take longer some."""


class Killed(BaseException):
    """No handler may catch it, as none catches SIGKILL."""


class DyingStorage(Storage):
    """Passes on to another storage until its k-th operation; dies before it, or after it was done."""

    def __init__(self, inner: Storage, last: int, done: bool, die) -> None:
        self.inner, self.url, self.last, self.done, self.die, self.operations = inner, inner.url, last, done, die, []

    def _step(self, operation, name, *args):
        if len(self.operations) == self.last and not self.done:
            self.die()
        result = getattr(self.inner, operation)(name, *args)
        if len(self.operations) == self.last:
            self.die()
        self.operations.append(f"{operation} {name}")
        return result

    def read(self, name):
        return self._step("read", name)

    def read_range(self, name, begin, end):
        return self._step("read_range", name, begin, end)

    def write(self, name, data):
        self._step("write", name, data)

    def create(self, name, data):
        return self._step("create", name, data)

    def delete(self, name):
        self._step("delete", name)

    def entry(self, name):
        return self._step("entry", name)

    def list_entries(self, prefix):
        return self._step("list_entries", prefix)

    def child_url(self, name):
        return self.inner.child_url(name)


def die_by_exception():
    raise Killed


def die_by_signal():
    os.kill(os.getpid(), signal.SIGKILL)


def run(storage: Storage, folder: Path) -> str:
    """Plan, texts and tokens of a corpus, committed and published; the identity of what was published."""
    store = Store(storage)
    plan_digest = ingest(store, list_files([str(folder / "corpus.jsonl")]), SETTINGS).plan_digest
    columns = TextColumns(store, store.plan(plan_digest))
    columns.add_tokens(Tokenizer.from_folder(str(folder / "tokenizer")), "tokens")
    columns.fill()
    change = lambda current: next_manifest(store, current, plan_digest, columns.requested)  # noqa: E731
    return store.publish("demo", change).manifest.identity


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    rows = [json.dumps({"text": f"{number}. {TEXTS[number % 3]}"}) + "\n" for number in range(4)]
    (folder / "corpus.jsonl").write_text("".join(rows))
    build_bytelevel_tokenizer(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def identity(inputs) -> str:
    """Of an undisturbed run."""
    return run(Store.open_or_create(new_url("memory://undisturbed")).storage, inputs)


@pytest.fixture(scope="module")
def server():
    with faulty_s3() as proxy:
        yield proxy


@pytest.fixture(params=["folder", "memory", "s3"])
def place(request, tmp_path):
    """Where stores go, and which steps are tried."""
    if request.param == "s3":
        request.getfixturevalue("server").reset()
        return "s3://bucket", EVERY["s3"]
    return (str(tmp_path) if request.param == "folder" else "memory://steps"), EVERY[request.param]


def check_and_finish(url: str, inputs: Path, identity: str) -> None:
    store = Store.open(url)
    assert verify(store).faults == ()
    published = store.datasets()
    assert run(store.storage, inputs) == identity
    assert verify(store).faults == ()
    # Killed right after its version was created, it had published; else it had not. Never twice.
    assert store.versions() == [("demo", 1)]
    assert published in ({}, {"demo": 1})


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_killed_at_any_step_leaves_a_whole_store_and_ends_alike(place, inputs, identity, done):
    bucket, every = place
    counting = DyingStorage(Store.open_or_create(new_url(bucket)).storage, -1, False, die_by_exception)
    assert run(counting, inputs) == identity
    kinds = {f"{step.split()[0]} {step.split()[1].split('/')[0]}" for step in counting.operations}
    assert {"write parts", "create recipes", "write manifests", "create datasets", "write plans"} <= kinds
    for last in range(every // 2 * done, len(counting.operations), every):
        url = new_url(bucket)
        dying = DyingStorage(Store.open_or_create(url).storage, last, done, die_by_exception)
        with pytest.raises(Killed):
            run(dying, inputs)
        check_and_finish(url, inputs, identity)


@pytest.mark.parametrize(("place", "last"), [("folder", 9), ("folder", 30), ("s3", 25)], indirect=["place"])
def test_killed_by_a_signal_leaves_a_whole_store_and_ends_alike(place, inputs, identity, last):
    """The same with a process of its own and a signal that nothing can catch."""
    url = new_url(place[0])
    Store.open_or_create(url)
    program = [sys.executable, "-m", "test_faults_steps", url, str(inputs), str(last)]
    died = subprocess.run(program, cwd=Path(__file__).parent, capture_output=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    check_and_finish(url, inputs, identity)


FAULTS = {
    "lost answer": lose_answer,
    "lost request": lose_request,
    "503": refuse(503, "SlowDown"),
    "409": refuse(409, "ConditionalRequestConflict"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_fault_at_any_request_of_a_run_changes_nothing(server, inputs, identity, fault, monkeypatch):
    """Every request of a whole run is met by the fault, and then served."""
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.01)
    server.reset()
    url = new_url()
    served: set[tuple[str, str]] = set()

    def first_time(handler, request):
        if (request.method, request.target) in served:
            handler.send(request, handler.owner.forward(request))
        else:
            served.add((request.method, request.target))
            fault(handler, request)

    server.inject(first_time, times=10_000)
    store = Store.open_or_create(url)
    assert run(store.storage, inputs) == identity
    server.reset()
    assert verify(store).faults == ()
    assert store.versions() == [("demo", 1)]
    assert len(served) > 30


def test_listing_that_lags_delays_no_publisher(server, inputs, identity):
    """Versions are created under numbers that no listing shows yet, and found there."""
    server.reset()
    store = Store.open_or_create(new_url())
    server.listings_lag_seconds = 3600.0
    assert run(store.storage, inputs) == identity
    assert run(store.storage, inputs) == identity
    version = store.dataset("demo")
    for number in range(2, 5):
        relabelled = next_manifest(
            store,
            version.manifest,
            version.manifest.plan_digest,
            {column.id: (column.template, f"{column.label}+{number}") for column in version.manifest.columns[1:]},
        )
        assert store.publish("demo", lambda current, changed=relabelled: changed).number == number
        assert store.dataset("demo").number == number
    assert list(store.storage.list("datasets/demo")) == []


if __name__ == "__main__":
    run(DyingStorage(open_storage(sys.argv[1]), int(sys.argv[3]), False, die_by_signal), Path(sys.argv[2]))
