"""Index pages that were read: each once, whoever asks, for as long as the store is open."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from logitstore.index_pages import IndexPage


class PageCache:
    """Pages by digest. Those of 100,000 blocks are some ten megabytes a column."""

    def __init__(self, read: Callable[[str], bytes]) -> None:
        """Args: ``read`` gives the checked bytes of a page."""
        self._read, self._lock = read, threading.Lock()
        self._pages: dict[str, Future[IndexPage]] = {}

    def page(self, digest: str) -> IndexPage:
        """The page of a digest. Threads that ask for one at once wait for one request."""
        with self._lock:
            known = self._pages.get(digest)
            future = known or self._pages.setdefault(digest, Future())
        if known is None:
            try:
                future.set_result(IndexPage(self._read(digest)))
            except BaseException as error:
                self._pages.pop(digest, None)  # who asks next may have better luck
                future.set_exception(error)
        return future.result()
