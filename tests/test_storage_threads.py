"""Many requests at once: in order, bounded, and stopped by the first error."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from logitstore.storage import map_threads


def test_map_threads_keeps_the_order_whatever_is_done_first():
    def slower_first(number: int) -> int:
        time.sleep(0.02 * (number % 3 == 0))
        return -number

    assert list(map_threads(slower_first, range(50), num_threads=8)) == [-number for number in range(50)]


@pytest.mark.parametrize("items", [[], [1], range(100)])
@pytest.mark.parametrize("num_threads", [1, 3, 200])
def test_map_threads_takes_any_number_of_items(items, num_threads):
    assert list(map_threads(str, items, num_threads)) == [str(item) for item in items]


def test_map_threads_runs_as_many_as_asked_at_once():
    together = threading.Barrier(4, timeout=10)
    assert len(list(map_threads(lambda _: together.wait(), range(8), num_threads=4))) == 8


def test_map_threads_begins_no_more_than_may_wait_for_the_caller():
    begun = 0

    def begin(number: int) -> int:
        nonlocal begun
        begun += 1
        return number

    results = map_threads(begin, itertools.count(), num_threads=1, ahead=5)
    assert next(results) == 0
    time.sleep(0.05)
    assert begun <= 6
    results.close()
    assert begun <= 6


def test_map_threads_raises_in_its_place_and_begins_nothing_after():
    begun = []

    def fail_at_three(number: int) -> int:
        begun.append(number)
        if number == 3:
            raise KeyError(number)
        return number

    results = map_threads(fail_at_three, range(1000), num_threads=2)
    assert list(itertools.islice(results, 3)) == [0, 1, 2]
    with pytest.raises(KeyError):
        next(results)
    assert len(begun) < 20
    assert list(results) == []
