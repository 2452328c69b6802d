"""Buckets, and whatever else fsspec opens, as a storage."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from logitstore.errors import StorageError
from logitstore.storage.answers import http_status
from logitstore.storage.interface import Entry, Storage, check_range
from logitstore.storage.retries import retry
from logitstore.urls import public_url

T = TypeVar("T")

_TIMES = ("LastModified", "mtime", "last_modified", "updated", "created")
"""What file systems call the time of a change, the most telling first."""


class RemoteStorage(Storage):
    """A bucket or any other fsspec file system that honours ``pipe_file(mode="create")``."""

    # fsspec's memory file system checks and then writes; one lock makes it the atomic create that buckets have.
    _memory_lock = threading.Lock()

    def __init__(self, url: str, fs: fsspec.AbstractFileSystem, root: str) -> None:
        self.url = public_url(url)
        self._opened, self._process, self._root = fs, os.getpid(), root.rstrip("/")

    def read(self, name: str) -> bytes:
        return self._retry(name, lambda fs: fs.cat_file(self._path(name)))

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        if begin == end:
            return b""
        try:
            data = self._retry(name, lambda fs: fs.cat_file(self._path(name), start=begin, end=end))
        except StorageError as error:
            if http_status(error.__cause__) != 416:  # nothing at ``begin`` or after it
                raise
            data = b""
        return check_range(self.child_url(name), data, begin, end)

    def write(self, name: str, data: bytes) -> None:
        self._retry(name, lambda fs: fs.pipe_file(self._path(name), data))

    def create(self, name: str, data: bytes) -> bool:
        in_memory = isinstance(self._fs, MemoryFileSystem)
        lock: AbstractContextManager[Any] = self._memory_lock if in_memory else nullcontext()
        try:
            with lock:
                self._retry(name, lambda fs: fs.pipe_file(self._path(name), data, mode="create"))
        except FileExistsError:
            return False
        return True

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._retry(name, lambda fs: fs.rm_file(self._path(name)))

    def entry(self, name: str) -> Entry | None:
        # Not fs.exists, which takes any failure for "no"; nor a listing of before, since others write here too.
        self._fs.invalidate_cache(self._path(name))
        try:
            info = self._retry(name, lambda fs: fs.info(self._path(name)))
        except FileNotFoundError:
            return None
        return self._entry(name, info) if info["type"] == "file" else None

    def list_entries(self, prefix: str) -> Iterator[Entry]:
        folder = self._path(prefix).rstrip("/")
        self._fs.invalidate_cache()
        for path, info in self._retry(prefix, lambda fs: fs.find(folder, detail=True)).items():
            yield self._entry(path[len(self._root) + 1 :], info)

    def child_url(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}"

    @property
    def _fs(self) -> fsspec.AbstractFileSystem:
        if self._process != os.getpid():  # a client's sockets and threads do not survive a fork
            self._opened = type(self._opened)(*self._opened.storage_args, **self._opened.storage_options)
            self._process = os.getpid()
        return self._opened

    def _entry(self, name: str, info: dict[str, Any]) -> Entry:
        return Entry(name, int(info["size"]), _modified(info))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _retry(self, name: str, request: Callable[[fsspec.AbstractFileSystem], T]) -> T:
        return retry(f"{self.url}/{name}", lambda: request(self._fs))


def _modified(info: dict[str, Any]) -> float | None:
    found = next((info[key] for key in _TIMES if info.get(key)), None)
    if isinstance(found, str):
        found = datetime.fromisoformat(found)
    return found.timestamp() if isinstance(found, datetime) else found
