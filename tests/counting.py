"""A storage that writes down every request."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

from logitstore.storage import Entry, Storage


class CountingStorage(Storage):
    """Hands requests on to another storage.

    Attributes:
        requests: (method, name) in the order in which they began.
    """

    def __init__(self, storage: Storage) -> None:
        self.url, self._storage, self._lock = storage.url, storage, threading.Lock()
        self.requests: list[tuple[str, str]] = []

    def read(self, name: str) -> bytes:
        self._count("read", name)
        return self._storage.read(name)

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        self._count("read", name)
        return self._storage.read_range(name, begin, end)

    def write(self, name: str, data: bytes) -> None:
        self._count("write", name)
        self._storage.write(name, data)

    def create(self, name: str, data: bytes) -> bool:
        self._count("create", name)
        return self._storage.create(name, data)

    def delete(self, name: str) -> None:
        self._count("delete", name)
        self._storage.delete(name)

    def entry(self, name: str) -> Entry | None:
        self._count("entry", name)
        return self._storage.entry(name)

    def list_entries(self, prefix: str) -> Iterator[Entry]:
        self._count("list", prefix)
        return self._storage.list_entries(prefix)

    def child_url(self, name: str) -> str:
        return self._storage.child_url(name)

    def names(self, method: str, folder: str = "") -> list[str]:
        """Of the requests of a method for names that begin with ``folder``."""
        return [name for found, name in self.requests if found == method and name.startswith(folder)]

    def by_folder(self, method: str) -> Counter[str]:
        return Counter(name.split("/")[0] for name in self.names(method))

    def _count(self, method: str, name: str) -> None:
        with self._lock:
            self.requests.append((method, name))
