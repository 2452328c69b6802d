"""Two to eight producers at once: one winner for each recipe, one content, no mixture, one version."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from buckets import faulty_s3, new_url

from logitstore.digests import digest_bytes
from logitstore.recipes import Answer
from logitstore.staging import ArrayToStore, stage
from logitstore.storage import LocalStorage, open_storage
from logitstore.store import Store

NUM_BLOCKS = 12


@pytest.fixture(scope="module")
def server():
    with faulty_s3() as proxy:
        yield proxy


@pytest.fixture(params=["folder", "memory", "s3"])
def url(request, tmp_path):
    if request.param == "s3":
        request.getfixturevalue("server").reset()
        return new_url()
    return str(tmp_path / "store") if request.param == "folder" else new_url("memory://racing")


def recipe_of(block: int) -> dict[str, str]:
    return {"kind": "signal", "block": str(block)}


def work(url: str, worker: int) -> list[dict[str, str]]:
    """What a producer does whose numbers differ from all others', as bf16 differs between GPUs."""
    store = Store.open_or_create(url)
    won = []
    for step in range(NUM_BLOCKS):
        block = (step + worker) % NUM_BLOCKS if worker % 2 else step
        answer = store.answer(recipe_of(block))
        if answer is None:
            values = np.full((500, 2), worker, np.float32)
            part = stage("signal", {"scalars": ArrayToStore(values)}, {})
            answer = store.commit_part(recipe_of(block), part, {"num_rows": 500}, {"worker": worker})
        won.append((block, answer.result))
    return [result for _, result in sorted(won, key=lambda pair: pair[0])]


def check(url: str, found: list[list[dict[str, str]]]) -> None:
    """All workers were told the same, and what they were told is there, whole and of one worker."""
    assert all(each == found[0] for each in found)
    store = Store.open(url)
    for block, result in enumerate(found[0]):
        answer = store.answer(recipe_of(block))
        assert answer is not None
        assert answer.result == result
        part = store.part(answer.part)
        assert part.damage() == []
        assert part.content == answer.content
        assert len(np.unique(part.array("scalars"))) == 1


@pytest.mark.parametrize("num_workers", [2, 8])
def test_racing_threads_have_one_winner_a_recipe(url, num_workers):
    barrier = threading.Barrier(num_workers)

    def race(worker: int) -> list[dict[str, str]]:
        barrier.wait()
        return work(url, worker)

    with ThreadPoolExecutor(num_workers) as pool:
        check(url, list(pool.map(race, range(num_workers))))


@pytest.mark.parametrize(("url", "num_workers"), [("folder", 8), ("s3", 3)], indirect=["url"])
def test_racing_processes_have_one_winner_a_recipe(url, num_workers):
    program = [sys.executable, "-m", "test_racing", url]
    processes = [
        subprocess.Popen(
            [*program, str(worker)], cwd=Path(__file__).parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for worker in range(num_workers)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    check(url, [json.loads(process.communicate(timeout=120)[0]) for process in processes])


def test_local_create_has_one_winner_in_three_hundred_races(tmp_path):
    """fsspec's local create let several win in 35 of 300 trials."""
    num_workers, num_trials = 8, 300
    storages = [LocalStorage(str(tmp_path)) for _ in range(num_workers)]
    barrier = threading.Barrier(num_workers)

    def race(worker: int) -> list[bool]:
        won = []
        for trial in range(num_trials):
            barrier.wait()
            won.append(storages[worker].create(f"recipes/{trial % 7}/{trial}", b"%d" % worker))
        return won

    with ThreadPoolExecutor(num_workers) as pool:
        won = np.array(list(pool.map(race, range(num_workers))))
    assert (won.sum(0) == 1).all()
    for trial, winner in enumerate(won.argmax(0)):
        assert storages[0].read(f"recipes/{trial % 7}/{trial}") == b"%d" % winner


def test_deleting_and_creating_in_one_folder_lose_nothing(tmp_path):
    """Deletion removes emptied folders, under the feet of those who are about to write there."""

    def work(worker: int) -> None:
        storage = LocalStorage(str(tmp_path))
        for number in range(100):
            name = f"parts/a/b/{worker}"
            storage.write(name, b"%d" % number)
            assert storage.read(name) == b"%d" % number
            storage.delete(name)
            assert storage.create(name, b"")
            storage.delete(name)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert not (tmp_path / "parts/a").exists()


def test_same_object_written_by_many_is_whole_at_every_moment(url):
    """Writers of one name write the same bytes; a reader meanwhile sees nothing or all."""
    data = np.random.default_rng(0).bytes(100_000)
    storage, digest = open_storage(url), digest_bytes(data)
    with ThreadPoolExecutor(4) as pool:
        writing = [pool.submit(storage.write, "parts/x", data) for _ in range(24)]
        while not all(each.done() for each in writing):
            if storage.exists("parts/x"):
                assert digest_bytes(storage.read("parts/x")) == digest
        for each in writing:
            each.result()


def test_answer_of_a_writer_that_was_beaten_is_the_winners(url):
    store = Store.open_or_create(url)
    first = store.commit_result(recipe_of(0), {"plan": "a"}, {})
    assert store.commit_result(recipe_of(0), {"plan": "b"}, {}) == first == Answer({"plan": "a"}, first.stats)


if __name__ == "__main__":
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(work(sys.argv[1], int(sys.argv[2]))))
