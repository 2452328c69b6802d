"""Recipes: one key for one meaning, one answer for one key, whoever races for it."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest

from logitstore.errors import DamageError
from logitstore.recipes import WRITER, Answer, commit_answer, find_answer, recipe_path
from logitstore.records import open_record, seal_record
from logitstore.storage import open_storage

RECIPE = {"kind": "signal", "version": "1", "tokens": "ab", "temperatures": ["1.0", "2.0"]}


@pytest.fixture(params=["folder", "memory"])
def storage(request, tmp_path):
    return open_storage(str(tmp_path) if request.param == "folder" else f"memory://{uuid4().hex}")


def answer(name: str) -> Answer:
    return Answer({"part": name, "content": f"content of {name}"}, {"num_rows": len(name)})


def test_recipe_path_is_a_function_of_the_meaning():
    assert recipe_path(RECIPE) == recipe_path(dict(reversed(RECIPE.items())))
    assert recipe_path(RECIPE) == recipe_path(json.loads(json.dumps(RECIPE)))
    for change in ({"version": "2"}, {"temperatures": ["2.0", "1.0"]}, {"tokens": None}, {"more": ""}):
        assert recipe_path(RECIPE | change) != recipe_path(RECIPE)


def test_recipe_with_a_float_is_refused():
    with pytest.raises(TypeError, match="decimal string"):
        recipe_path({"temperature": 1.0})


def test_answer_is_found_again(storage):
    assert find_answer(storage, RECIPE) is None
    assert commit_answer(storage, RECIPE, answer("a"), {"device": "cpu"}) == answer("a")
    assert find_answer(storage, RECIPE) == answer("a")
    assert (answer("a").part, answer("a").content) == ("a", "content of a")


def test_record_says_who_and_how(storage):
    commit_answer(storage, RECIPE, answer("a"), {"device": "cpu"})
    record = open_record(storage.read(recipe_path(RECIPE)), "")
    assert record["recipe"] == RECIPE
    assert record["writer"] == WRITER
    assert record["provenance"] == {"device": "cpu"}


def test_second_commit_gets_the_first_answer(storage):
    commit_answer(storage, RECIPE, answer("first"), {})
    assert commit_answer(storage, RECIPE, answer("second"), {}) == answer("first")


def test_racing_threads_all_get_the_same_answer(storage):
    num_threads = 12
    barrier = threading.Barrier(num_threads)

    def work(number: int) -> list[Answer]:
        barrier.wait()
        return [commit_answer(storage, RECIPE | {"block": block}, answer(f"{number}"), {}) for block in "abcd"]

    with ThreadPoolExecutor(num_threads) as pool:
        found = list(pool.map(work, range(num_threads)))
    for got in zip(*found, strict=True):
        assert len({one.part for one in got}) == 1


def test_racing_processes_all_get_the_same_answer(tmp_path):
    script = textwrap.dedent("""
        import json, sys
        from logitstore.recipes import Answer, commit_answer
        from logitstore.storage import open_storage
        url, number = sys.argv[1:]
        storage = open_storage(url)
        print("ready", flush=True)
        sys.stdin.readline()
        mine = Answer({"part": number, "content": number}, {})
        print(json.dumps([commit_answer(storage, {"block": str(n)}, mine, {}).part for n in range(100)]))
    """)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    found = [json.loads(process.communicate()[0]) for process in processes]
    assert found[0] == found[1] == found[2]
    assert [find_answer(open_storage(str(tmp_path)), {"block": str(n)}).part for n in range(100)] == found[0]


def test_damaged_answer_is_named(storage):
    commit_answer(storage, RECIPE, answer("a"), {})
    path = recipe_path(RECIPE)
    storage.write(path, storage.read(path).replace(b"content of a", b"content of b"))
    for call in (lambda: find_answer(storage, RECIPE), lambda: commit_answer(storage, RECIPE, answer("c"), {})):
        with pytest.raises(DamageError, match=path):
            call()


def test_answer_under_another_recipes_name_is_refused(storage):
    record = {"recipe": RECIPE, "result": {"part": "a", "content": "b"}, "stats": {}}
    other = RECIPE | {"version": "2"}
    storage.write(recipe_path(other), seal_record(record))
    with pytest.raises(DamageError, match="another recipe"):
        find_answer(storage, other)
