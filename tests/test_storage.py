"""Storage: one suite over a folder, memory and a bucket, and the faults of disks and networks, injected."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest
from buckets import faulty_s3
from fsspec.implementations.memory import MemoryFileSystem

from logitstore.errors import DamageError, StorageError
from logitstore.recipes import Answer, commit_answer, find_answer
from logitstore.storage import LocalStorage, RemoteStorage, Storage, open_storage, retries


@pytest.fixture(scope="module")
def bucket():
    """A bucket that honours conditional creates; its URL."""
    with faulty_s3():
        yield "s3://bucket"


@pytest.fixture(params=["folder", "memory", "s3"])
def url(request, tmp_path):
    match request.param:
        case "folder":
            return str(tmp_path / "new" / "store")
        case "memory":
            return f"memory://{uuid4().hex}/store"
    return f"{request.getfixturevalue('bucket')}/{uuid4().hex}/store"


@pytest.fixture
def storage(url):
    return open_storage(url)


# What every storage promises


def test_write_read_replace(storage):
    for data in (b"one", b"", bytes(range(256)) * 300):
        storage.write("a/b/c", data)
        assert storage.read("a/b/c") == data


def test_read_of_nothing_is_file_not_found(storage):
    storage.write("a/b", b"")
    for name in ("x", "a/x", "a/b/c"):
        with pytest.raises(FileNotFoundError):
            storage.read(name)
        assert not storage.exists(name)


def test_read_range_gives_that_range_or_says_that_the_object_is_too_short(storage):
    storage.write("a/b", bytes(range(100)))
    assert storage.read_range("a/b", 0, 100) == bytes(range(100))
    assert storage.read_range("a/b", 10, 30) == bytes(range(10, 30))
    assert storage.read_range("a/b", 99, 100) == b"c"
    assert storage.read_range("a/b", 7, 7) == b""
    for begin, end in ((90, 101), (100, 101), (200, 300)):
        with pytest.raises(DamageError, match="a/b: bytes"):
            storage.read_range("a/b", begin, end)
    for name in ("a", "a/x", "a/b/c"):
        with pytest.raises(FileNotFoundError):
            storage.read_range(name, 0, 1)


def test_delete_removes_one_object_and_takes_absence_well(storage):
    for name in ("a/b/c", "a/b/d", "a/bc"):
        storage.write(name, b"x")
    storage.delete("a/b/c")
    assert set(storage.list("a")) == {"a/b/d", "a/bc"}
    for name in ("a/b/c", "x", "a/b", "a/bc/d"):
        storage.delete(name)
    assert set(storage.list("a")) == {"a/b/d", "a/bc"}
    storage.delete("a/b/d")
    storage.write("a/b/d", b"again")
    assert storage.read("a/b/d") == b"again"
    storage.delete("a/b/d")
    assert storage.create("a/b/d", b"created")


def test_entry_tells_size_and_age_of_objects_only(storage):
    before = time.time()
    storage.write("a/b", b"12345")
    found = storage.entry("a/b")
    assert found is not None
    assert (found.name, found.num_bytes) == ("a/b", 5)
    assert before - 2 < found.modified < time.time() + 2  # S3 tells whole seconds
    for name in ("a", "a/c", "a/b/c"):
        assert storage.entry(name) is None
        assert not storage.exists(name)


def test_list_entries_tells_what_entry_tells(storage):
    for size, name in enumerate(("a/1", "a/b/2", "ab/3")):
        storage.write(name, b"x" * size)
    found = {entry.name: entry for entry in storage.list_entries("a")}
    assert set(found) == {"a/1", "a/b/2"}
    for name, entry in found.items():
        alone = storage.entry(name)
        assert alone.num_bytes == entry.num_bytes
        assert abs(alone.modified - entry.modified) < 1.5


def test_exists_sees_what_others_write_after_a_listing(storage, url):
    storage.write("parts/a", b"")
    assert list(storage.list("parts")) == ["parts/a"]
    assert not storage.exists("parts/b")
    open_storage(url).write("parts/b", b"")
    assert storage.exists("parts/b")
    assert sorted(storage.list("parts")) == ["parts/a", "parts/b"]


def test_list_names_all_objects_below_a_folder_only(storage):
    names = {"a/1", "a/b/2", "ab/3", "4"}
    for name in names:
        storage.write(name, b"x")
    assert {name for name in storage.list("") if not name.startswith("tmp/")} == names
    assert set(storage.list("a")) == {"a/1", "a/b/2"}
    assert set(storage.list("nothing/there")) == set()


def test_create_twice_keeps_the_first(storage):
    assert storage.create("recipes/r.json", b"first")
    assert not storage.create("recipes/r.json", b"second")
    assert storage.read("recipes/r.json") == b"first"
    storage.write("other", b"")
    assert not storage.create("other", b"second")


def test_create_by_many_threads_has_one_winner_each(storage, url):
    num_threads, num_names = 8, 10
    barrier = threading.Barrier(num_threads)

    def work(worker: int) -> list[bool]:
        own = open_storage(url)
        barrier.wait()
        return [own.create(f"recipes/{name}", b"%d" % worker * 1000) for name in range(num_names)]

    with ThreadPoolExecutor(num_threads) as pool:
        won = list(pool.map(work, range(num_threads)))
    for name in range(num_names):
        winners = [worker for worker in range(num_threads) if won[worker][name]]
        assert len(winners) == 1
        assert storage.read(f"recipes/{name}") == b"%d" % winners[0] * 1000


def test_child_url_opens_with_fsspec(storage, url):
    storage.write("parts/a/seal.json", b"seal")
    with fsspec.open(storage.child_url("parts/a") + "/seal.json") as file:
        assert file.read() == b"seal"


# URLs


def test_messages_of_a_remote_storage_hold_no_credentials():
    fs = MemoryFileSystem()
    storage = RemoteStorage("ftp://user:secret@host/root?token=secret", fs, "/root")
    assert "secret" not in storage.url + storage.child_url("a")


@pytest.mark.parametrize("url", ["nosuchprotocol://key:secret@x/y"])
def test_open_storage_of_an_unknown_protocol_is_refused(url):
    with pytest.raises(StorageError, match="nosuchprotocol") as caught:
        open_storage(url)
    assert "secret" not in str(caught.value)


def test_open_storage_takes_paths_and_file_urls_alike(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for url in ("s", f"file://{tmp_path}/s", f"local://{tmp_path}/s"):
        found = open_storage(url)
        assert isinstance(found, LocalStorage)
        assert found.url == str(tmp_path / "s")


# Faults of a disk


@pytest.mark.parametrize("operation", ["write", "create"])
def test_full_disk_says_so_and_leaves_nothing(tmp_path, monkeypatch, operation):
    storage = LocalStorage(str(tmp_path))
    storage.write("a", b"old")
    monkeypatch.setattr(os, "fsync", raiser(errno.ENOSPC))
    for name in ("b", "a")[: 1 + (operation == "write")]:
        with pytest.raises(StorageError, match="no space left"):
            getattr(storage, operation)(name, b"new")
    assert storage.read("a") == b"old"
    assert not storage.exists("b")
    assert list(storage.list("tmp")) == []


def raiser(code: int) -> Callable[..., None]:
    def fail(*args):
        raise OSError(code, os.strerror(code))

    return fail


def test_disk_full_at_the_first_byte_says_so(tmp_path, monkeypatch):
    storage = LocalStorage(str(tmp_path))
    monkeypatch.setattr(Path, "open", raiser(errno.EDQUOT))
    with pytest.raises(StorageError, match="no space left"):
        storage.write("a", b"new")


@pytest.mark.parametrize("blocked", ["", "tmp", "recipes"])
def test_file_where_a_folder_must_stand_is_a_storage_error(tmp_path, blocked):
    """Not "it exists already": nobody wrote the object, and a caller must not believe so."""
    root = tmp_path / "store"
    (root / blocked).parent.mkdir(parents=True, exist_ok=True)
    (root / blocked).write_text("a file")
    storage = LocalStorage(str(root))
    for operation in (storage.write, storage.create):
        with pytest.raises(StorageError, match=r"recipes/r\.json: cannot write 4 bytes"):
            operation("recipes/r.json", b"data")
    assert not storage.exists("recipes/r.json")


def test_unreadable_folder_is_not_an_empty_one(tmp_path, monkeypatch):
    storage = LocalStorage(str(tmp_path))
    storage.write("datasets/d/1.json", b"")
    monkeypatch.setattr(os, "scandir", raiser(errno.EACCES))
    with pytest.raises(StorageError, match="cannot list"):
        list(storage.list("datasets"))


def test_killed_writer_leaves_whole_objects_only(tmp_path):
    """kill -9 in the middle of many writes, several times: every object that is there is whole."""
    script = textwrap.dedent("""
        import sys
        from logitstore.storage import LocalStorage
        storage, n = LocalStorage(sys.argv[1]), 0
        print("ready", flush=True)
        while True:
            body = b"%09d" % n * 20_000
            storage.write(f"parts/{n % 7}", body)
            storage.create(f"recipes/{n}", body)
            n += 1
    """)
    for delay in (0.02, 0.05, 0.09):
        with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
    storage = LocalStorage(str(tmp_path))
    names = [name for name in storage.list("") if not name.startswith("tmp/")]
    assert any(name.startswith("recipes/") for name in names)
    for name in names:
        data = storage.read(name)
        assert len(data) == 9 * 20_000
        assert data == data[:9] * 20_000
        assert not name.startswith("recipes/") or int(data[:9]) == int(name.split("/")[1])


# Faults of a network


class FlakyFileSystem(MemoryFileSystem):
    """Memory that fails: each request takes the next entry of ``faults``; ``late`` ones fail after they succeeded."""

    cachable = False

    def __init__(self, faults: list[BaseException], late: bool = False) -> None:
        super().__init__()
        self.faults, self.late, self.num_requests, self._depth = list(faults), late, 0, 0

    def _attempt(self, request: Callable):
        if self._depth:  # memory asks itself whether a file exists
            return request()
        self.num_requests += 1
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None and not self.late:
            raise fault
        self._depth += 1
        try:
            result = request()
        finally:
            self._depth -= 1
        if fault is not None:
            raise fault
        return result

    def cat_file(self, path, **options):
        return self._attempt(lambda: MemoryFileSystem.cat_file(self, path, **options))

    def pipe_file(self, path, value, mode="overwrite", **options):
        return self._attempt(lambda: MemoryFileSystem.pipe_file(self, path, value, mode=mode, **options))

    def info(self, path, **options):
        return self._attempt(lambda: MemoryFileSystem.info(self, path, **options))

    def find(self, path, **options):
        return self._attempt(lambda: MemoryFileSystem.find(self, path, **options))


class ClientLibraryError(Exception):
    """What HTTP clients raise: no OSError."""


TRANSIENT = [
    ConnectionResetError("reset"),
    TimeoutError(),
    OSError(errno.EIO, "503"),
    ClientLibraryError("gone"),
]


@pytest.fixture
def sleeps(monkeypatch):
    """The pauses between attempts, none of which is waited for."""
    taken: list[float] = []
    now = [0.0]

    def sleep(seconds):
        taken.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(retries.time, "sleep", sleep)
    monkeypatch.setattr(retries.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(retries.random, "uniform", lambda low, high: high)
    return taken


def flaky(faults: list[BaseException], late: bool = False) -> tuple[RemoteStorage, FlakyFileSystem]:
    root = f"/{uuid4().hex}"
    fs = FlakyFileSystem([], late)
    storage = RemoteStorage(f"flaky://user:secret@{root}", fs, root)
    storage.write("there", b"data")
    fs.faults, fs.num_requests = list(faults), 0
    return storage, fs


OPERATIONS: dict[str, Callable[[Storage], object]] = {
    "read": lambda storage: storage.read("there"),
    "write": lambda storage: storage.write("new", b"data"),
    "create": lambda storage: storage.create("new", b"data"),
    "exists": lambda storage: storage.exists("there"),
    "list": lambda storage: list(storage.list("")),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_transient_failures_are_tried_again(sleeps, operation):
    storage, fs = flaky(TRANSIENT)
    assert operation(storage) in (b"data", True, None, ["there"])
    assert fs.num_requests == len(TRANSIENT) + 1
    assert sleeps == [0.2, 0.4, 0.8, 1.6]
    assert storage.read("there") == b"data"


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize(
    "fault",
    [
        PermissionError("403"),
        NotImplementedError("no"),
        ValueError("bad"),
        TypeError("mode"),
        OSError(errno.ENOSPC, "full"),
        type("NoCredentialsError", (Exception,), {})("none"),
    ],
    ids=lambda fault: type(fault).__name__,
)
def test_final_failures_are_not_tried_again(sleeps, operation, fault):
    storage, fs = flaky([fault])
    with pytest.raises(StorageError) as caught:
        operation(storage)
    assert (fs.num_requests, sleeps) == (1, [])
    assert ("no space left" in str(caught.value)) == (getattr(fault, "errno", None) == errno.ENOSPC)


def test_missing_and_taken_are_answers_and_not_tried_again(sleeps):
    storage, fs = flaky([])
    with pytest.raises(FileNotFoundError):
        storage.read("nothing")
    assert not storage.exists("nothing")
    assert not storage.create("there", b"other")
    assert (fs.num_requests, sleeps) == (3, [])


def test_lasting_failure_is_given_up_after_three_minutes(sleeps):
    storage, _ = flaky([ConnectionResetError("reset by peer")] * 1000)
    with pytest.raises(StorageError, match="gave up after 180 s: reset by peer") as caught:
        storage.read("there")
    assert "secret" not in str(caught.value)
    assert 100 < sum(sleeps) <= 180
    assert max(sleeps) == 20.0


def test_create_whose_answer_is_lost_finds_itself_taken(sleeps):
    """The retry of a create that had succeeded is refused by its own write; so "taken" never proves another writer."""
    storage, _ = flaky([ConnectionResetError()], late=True)
    assert storage.create("recipe", b"mine") is False
    assert storage.read("recipe") == b"mine"


def test_commit_answer_whose_create_was_answered_by_silence_accepts_its_own_write(sleeps):
    storage, fs = flaky([ConnectionResetError()], late=True)
    recipe, mine = {"kind": "text", "block": "b"}, Answer({"part": "p1", "content": "c1"}, {"num_rows": 1})
    assert commit_answer(storage, recipe, mine, {}) == mine
    assert find_answer(storage, recipe) == mine
    fs.late = False
    other = Answer({"part": "p2", "content": "c2"}, {"num_rows": 2})
    assert commit_answer(storage, recipe, other, {}) == mine


def test_commit_answer_that_failed_after_writing_is_found_by_the_next_run(sleeps):
    storage, _ = flaky([PermissionError("token expired")], late=True)
    recipe, mine = {"kind": "text", "block": "b"}, Answer({"part": "p1", "content": "c1"}, {})
    with pytest.raises(StorageError, match="token expired"):
        commit_answer(storage, recipe, mine, {})
    assert commit_answer(storage, recipe, mine, {}) == find_answer(storage, recipe) == mine


def test_slow_create_on_a_bucket_does_not_block_others():
    """Only memory, whose create is not atomic by itself, is served one at a time."""
    inside = threading.Barrier(2, timeout=10)

    class Bucket(fsspec.AbstractFileSystem):
        cachable = False

        def pipe_file(self, path, value, mode="overwrite", **options):
            inside.wait()

    storage = RemoteStorage("bucket://b", Bucket(), "b")
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda name: storage.create(name, b""), ["a", "b"])) == [True, True]


# Leftovers, forks, odd names


def test_sweep_removes_old_leftovers_of_writers_only(tmp_path):
    storage = LocalStorage(str(tmp_path))
    storage.write("parts/old", b"kept")
    for name, age in (("old", 7200), ("new", 60)):
        (tmp_path / "tmp" / name).write_bytes(b"half")
        os.utime(tmp_path / "tmp" / name, (time.time() - age,) * 2)
    os.utime(tmp_path / "parts/old", (0, 0))
    assert storage.sweep(3600) == 1
    assert sorted(storage.list("")) == ["parts/old", "tmp/new"]
    assert open_storage("memory://nothing/there").sweep(0) == 0


def test_forked_process_reads_and_writes(storage, url):
    """Sockets and threads of a client do not survive a fork; a storage must."""
    if url.startswith("memory"):
        pytest.skip("memory is not shared by processes")
    storage.write("before", b"parent")
    script = textwrap.dedent("""
        import os, sys
        from logitstore.storage import open_storage
        storage = open_storage(sys.argv[1])
        assert storage.read("before") == b"parent"
        child = os.fork()
        if child == 0:
            storage.write("after", b"child")
            os._exit(0 if storage.read("before") == b"parent" else 1)
        sys.exit(os.waitpid(child, 0)[1])
    """)
    subprocess.run([sys.executable, "-c", script, url], check=True, timeout=60)
    assert storage.read("after") == b"child"


@pytest.mark.parametrize("odd", ["a b", "100%", "c#d", "e?f", "é你", "[g]*", "h&i=j+k", "%2F"])
def test_odd_names_and_roots_are_names(url, odd):
    storage = open_storage(f"{url}/{odd}")
    names = {odd, f"x/{odd}"}
    for name in names:
        storage.write(name, name.encode())
        assert storage.create(f"{name}.json", b"")
    for name in names:
        assert storage.read(name) == name.encode()
        assert not storage.create(f"{name}.json", b"")
    written = {name for name in storage.list("") if not name.startswith("tmp/")}
    assert written == names | {f"{name}.json" for name in names}
    storage.delete(f"x/{odd}")
    assert not storage.exists(f"x/{odd}")
    other = open_storage(storage.child_url("x"))
    assert other.read(f"{odd}.json") == b""
