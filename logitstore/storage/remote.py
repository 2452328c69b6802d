"""Buckets, and whatever else fsspec opens, as a storage."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from logitstore.errors import StorageError
from logitstore.storage.answers import http_status
from logitstore.storage.clients import reopen
from logitstore.storage.interface import Entry, Storage, check_range
from logitstore.storage.obstore_reads import FastReader, open_fast_reader
from logitstore.storage.retries import retry, storage_error
from logitstore.urls import public_url

ATTEMPT_SECONDS = 60.0
"""How long one attempt may take, besides the time for its bytes. Clients notice silence; this ends a trickle."""

_SLOWEST_BYTES_PER_SECOND = 1 << 18
_LARGEST_OBJECT_BYTES = 48 << 20
_FAST_RANGE_BYTES = 8 << 20

_TIMES = ("LastModified", "mtime", "last_modified", "updated", "created")
"""What file systems call the time of a change, the most telling first."""


class RemoteStorage(Storage):
    """A bucket or any other fsspec file system that honours ``pipe_file(mode="create")``."""

    # fsspec's memory file system checks and then writes; one lock makes it the atomic create that buckets have.
    _memory_lock = threading.Lock()

    def __init__(self, url: str, fs: fsspec.AbstractFileSystem, root: str) -> None:
        self.url = public_url(url)
        self._fast: FastReader | None = None
        self._fast_process = 0
        self._opened, self._process, self._root = fs, os.getpid(), root.rstrip("/")

    def read(self, name: str) -> bytes:
        return self._request(name, _LARGEST_OBJECT_BYTES, "cat_file")

    def read_range(self, name: str, begin: int, end: int) -> bytes | memoryview:
        if begin == end:
            return b""
        fast = self._read_fast(name, begin, end)
        if fast is not None and len(fast) == end - begin:
            return fast
        try:
            data = self._request(name, end - begin, "cat_file", start=begin, end=end)
        except StorageError as error:
            if http_status(error.__cause__) != 416:  # nothing at ``begin`` or after it
                raise
            data = b""
        return check_range(self.child_url(name), data, begin, end)

    def read_whole(self, name: str, num_bytes: int) -> bytes | memoryview:
        fast = self._read_fast(name, 0, None)
        return fast if fast is not None and len(fast) == num_bytes else super().read_whole(name, num_bytes)

    def _read_fast(self, name: str, begin: int, end: int | None) -> memoryview | None:
        """The bytes by a faster client, if there is one and it answers."""
        try:
            if self._fast_process != os.getpid():
                self._fast, self._fast_process = None, os.getpid()
                seconds = ATTEMPT_SECONDS + _FAST_RANGE_BYTES / _SLOWEST_BYTES_PER_SECOND
                self._fast = open_fast_reader(self._fs, self._root, seconds)
            return self._fast(self._path(name), begin, end) if self._fast else None
        except Exception:
            return None  # the other client tries again, and says what is wrong

    def write(self, name: str, data: bytes) -> None:
        self._put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        in_memory = isinstance(self._fs, MemoryFileSystem)
        lock: AbstractContextManager[Any] = self._memory_lock if in_memory else nullcontext()
        try:
            with lock:
                self._put(name, data, mode="create")
        except FileExistsError:
            return False
        return True

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._request(name, 0, "rm_file")

    def entry(self, name: str) -> Entry | None:
        # Not fs.exists, which takes any failure for "no"; nor a listing of before, since others write here too.
        self._fs.invalidate_cache(self._path(name))
        try:
            info = self._request(name, 0, "info")
        except FileNotFoundError:
            return None
        return Entry(name, int(info["size"]), _modified(info)) if info["type"] == "file" else None

    def list_entries(self, prefix: str) -> Iterator[Entry]:
        self._fs.invalidate_cache()
        found = self._request(prefix, _LARGEST_OBJECT_BYTES, "find", detail=True)
        for path, info in found.items():
            yield Entry(path[len(self._root) + 1 :], int(info["size"]), _modified(info))

    def child_url(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}"

    @property
    def _fs(self) -> fsspec.AbstractFileSystem:
        if self._process != os.getpid():  # a client's sockets and threads do not survive a fork
            self._opened = reopen(self._opened)
            self._process = os.getpid()
        return self._opened

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _put(self, name: str, data: bytes, **options: str) -> None:
        try:
            self._request(name, len(data), "pipe_file", data, **options)
        except FileNotFoundError as error:  # no bucket
            raise storage_error(f"{self.child_url(name)}: no place to write to", error) from error

    def _request(self, name: str, num_bytes: int, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the file system with the path of ``name``, trying again while that may help.

        Args:
            name: of the object.
            num_bytes: about what is transferred at most.
            method: of the file system.
            *args: for it, after the path.
            **options: for it.
        """

        def attempt() -> Any:
            fs = self._fs
            if isinstance(fs, AsyncFileSystem):
                options["timeout"] = ATTEMPT_SECONDS + num_bytes / _SLOWEST_BYTES_PER_SECOND
            try:
                return getattr(fs, method)(self._path(name), *args, **options)
            except Exception as error:
                if http_status(error) == 412:  # s3fs knows only AWS's wording of it
                    raise FileExistsError(self.child_url(name)) from error
                raise

        return retry(self.child_url(name), attempt)


def _modified(info: dict[str, Any]) -> float | None:
    found = next((info[key] for key in _TIMES if info.get(key)), None)
    if isinstance(found, str):
        found = datetime.fromisoformat(found)
    return found.timestamp() if isinstance(found, datetime) else found
