"""Many requests at once: over a network the wait for an answer costs more than the answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_threads(
    function: Callable[[Item], Result], items: Iterable[Item], num_threads: int = 16, ahead: int | None = None
) -> Iterator[Result]:
    """``map(function, items)`` in threads: results in the order of the items, at most ``ahead`` of them unclaimed.

    An error is raised where its result would have been, and nothing is begun after it. ``items`` is drawn from in the
    caller's thread, as results are claimed, so it may be endless.

    Args:
        function: called from several threads at once.
        items: its arguments.
        num_threads: how many calls run at once.
        ahead: how many calls may be begun or done whose results nobody has claimed; twice ``num_threads`` by default.
    """
    ahead = ahead or 2 * num_threads
    remaining = iter(items)
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="logitstore")
    wait = False  # an interrupt must not wait for requests that may be tried again for minutes
    try:
        begun: deque[Future[Result]] = deque(pool.submit(function, item) for item in islice(remaining, ahead))
        while begun:
            result = begun.popleft().result()
            begun.extend(pool.submit(function, item) for item in islice(remaining, 1))
            yield result
        wait = True
    except (Exception, GeneratorExit):
        wait = True
        raise
    finally:
        pool.shutdown(wait=wait, cancel_futures=True)
