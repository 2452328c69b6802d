"""Objects under one URL: whole reads, atomic writes, and create-if-absent, which every promise of the store rests on.

Local folders are handled here, because fsspec's local ``mode="create"`` races and shows partial files; everything
else (S3, GCS, memory, ...) goes through fsspec.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import fsspec
from fsspec.core import url_to_fs

from logitstore.errors import StorageError

T = TypeVar("T")

RETRY_SECONDS = 180.0
"""How long a failing remote request is tried again, with full jitter, before it is an error."""


class Storage(ABC):
    """A flat name space of immutable objects; names are ``/``-separated and relative to ``url``."""

    url: str

    @abstractmethod
    def read(self, name: str) -> bytes:
        """All bytes of an object. Raises FileNotFoundError when there is none."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Put an object, replacing any: a reader sees all of it or none."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Put an object only if there is none of that name; False if there was."""

    @abstractmethod
    def exists(self, name: str) -> bool: ...

    @abstractmethod
    def list(self, prefix: str) -> Iterator[str]:
        """Names of all objects below the folder ``prefix``, in no order."""

    @abstractmethod
    def child_url(self, name: str) -> str:
        """The URL of an object or folder, as ``zarr.open_group`` takes it."""


def open_storage(url: str) -> Storage:
    """The storage behind a local path or an fsspec URL.

    Raises:
        StorageError: the URL's protocol is unknown or its package is not installed.
    """
    protocol = urlsplit(url).scheme if "://" in url else "file"
    if protocol in {"file", "local"}:
        return LocalStorage(url.split("://", 1)[-1])
    try:
        fs, root = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise StorageError(f"{public_url(url)}: cannot open this kind of URL: {error}") from error
    return RemoteStorage(url, fs, root)


def public_url(url: str) -> str:
    """``url`` without user names, passwords and query strings, fit for messages and records."""
    if "://" not in url:
        return url
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rsplit("@", 1)[-1], parts.path, "", ""))


class LocalStorage(Storage):
    """A folder. Objects are written beside it (``tmp/``), synced, then moved or linked into place."""

    def __init__(self, path: str) -> None:
        self.root = Path(path).expanduser().absolute()
        self.url = str(self.root)

    def read(self, name: str) -> bytes:
        try:
            return (self.root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(str(self.root / name)) from error
        except OSError as error:
            raise _storage_error(f"{self.root / name}: cannot read", error) from error

    def write(self, name: str, data: bytes) -> None:
        self._place(name, data, os.replace)

    def create(self, name: str, data: bytes) -> bool:
        # link() fails when the name is taken, whoever took it, and never shows a partial file.
        try:
            self._place(name, data, os.link)
        except FileExistsError:
            return False
        return True

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()

    def list(self, prefix: str) -> Iterator[str]:
        for folder, _, files in os.walk(self.root / prefix):
            for file in files:
                yield (Path(folder) / file).relative_to(self.root).as_posix()

    def child_url(self, name: str) -> str:
        return str(self.root / name)

    def _place(self, name: str, data: bytes, move: Callable[[Path, Path], None]) -> None:
        target, temporary = self.root / name, self.root / "tmp" / uuid.uuid4().hex
        try:
            temporary.parent.mkdir(parents=True, exist_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            move(temporary, target)
            _sync_folder(target.parent)
        except FileExistsError:
            raise
        except OSError as error:
            raise _storage_error(f"{target}: cannot write {len(data)} bytes", error) from error
        finally:
            temporary.unlink(missing_ok=True)


class RemoteStorage(Storage):
    """A bucket or any other fsspec file system that honours ``pipe_file(mode="create")``."""

    # fsspec's memory file system checks and then writes; one lock makes it the atomic create that buckets have.
    _memory_lock = threading.Lock()

    def __init__(self, url: str, fs: fsspec.AbstractFileSystem, root: str) -> None:
        self.url = public_url(url)
        self._fs, self._root = fs, root.rstrip("/")

    def read(self, name: str) -> bytes:
        return self._retry(name, lambda: self._fs.cat_file(self._path(name)))

    def write(self, name: str, data: bytes) -> None:
        self._retry(name, lambda: self._fs.pipe_file(self._path(name), data))

    def create(self, name: str, data: bytes) -> bool:
        try:
            with self._memory_lock:
                self._retry(name, lambda: self._fs.pipe_file(self._path(name), data, mode="create"))
        except FileExistsError:
            return False
        return True

    def exists(self, name: str) -> bool:
        return self._retry(name, lambda: self._fs.exists(self._path(name)))

    def list(self, prefix: str) -> Iterator[str]:
        folder = self._path(prefix)
        self._fs.invalidate_cache()
        for path in self._retry(prefix, lambda: self._fs.find(folder)):
            yield path[len(self._root) + 1 :]

    def child_url(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}"

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _retry(self, name: str, request: Callable[[], T]) -> T:
        deadline, delay = time.monotonic() + RETRY_SECONDS, 0.2
        while True:
            try:
                return request()
            except (FileNotFoundError, FileExistsError):
                raise
            except (PermissionError, NotImplementedError, ValueError) as error:
                raise StorageError(f"{self.url}/{name}: {error}") from error
            except (OSError, TimeoutError) as error:
                if time.monotonic() + delay > deadline:
                    raise _storage_error(f"{self.url}/{name}: gave up after {RETRY_SECONDS:.0f} s", error) from error
            time.sleep(random.uniform(0, delay))
            delay = min(delay * 2, 20.0)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _storage_error(where: str, error: Any) -> StorageError:
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return StorageError(f"{where}: no space left; free some and run the same command again, nothing is lost")
    return StorageError(f"{where}: {error}")
