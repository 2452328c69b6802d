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
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem

from logitstore.errors import StorageError
from logitstore.urls import public_url

T = TypeVar("T")

RETRY_SECONDS = 180.0
"""How long a failing remote request is tried again, with full jitter, before it is an error."""

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_FINAL_OS_ERRORS = (PermissionError, IsADirectoryError, NotADirectoryError)
_MISUSE = (NotImplementedError, ValueError, TypeError, AttributeError, LookupError, ImportError, AssertionError)


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
        try:
            return (self.root / name).exists()
        except OSError as error:
            raise _storage_error(f"{self.root / name}: cannot look", error) from error

    def list(self, prefix: str) -> Iterator[str]:
        for folder, _, files in os.walk(self.root / prefix, onerror=_refuse_unlisted):
            for file in files:
                yield (Path(folder) / file).relative_to(self.root).as_posix()

    def child_url(self, name: str) -> str:
        return str(self.root / name)

    def _place(self, name: str, data: bytes, move: Callable[[Path, Path], None]) -> None:
        target, temporary = self.root / name, self.root / "tmp" / uuid.uuid4().hex
        try:
            _make_folder(temporary.parent)
            _make_folder(target.parent)
            try:
                with temporary.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                move(temporary, target)
            finally:
                temporary.unlink(missing_ok=True)
            _sync_folder(target.parent)
        except OSError as error:
            # Only a taken name means "exists": mkdir says the same of a file that stands where a folder must.
            if isinstance(error, FileExistsError) and move is os.link and target.exists():
                raise
            raise _storage_error(f"{target}: cannot write {len(data)} bytes", error) from error


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
        in_memory = isinstance(self._fs, MemoryFileSystem)
        lock: AbstractContextManager[Any] = self._memory_lock if in_memory else nullcontext()
        try:
            with lock:
                self._retry(name, lambda: self._fs.pipe_file(self._path(name), data, mode="create"))
        except FileExistsError:
            return False
        return True

    def exists(self, name: str) -> bool:
        # Not fs.exists, which takes any failure for "no"; nor a listing of before, since others write here too.
        self._fs.invalidate_cache(self._path(name))
        try:
            self._retry(name, lambda: self._fs.info(self._path(name)))
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str) -> Iterator[str]:
        folder = self._path(prefix).rstrip("/")
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
            except Exception as error:
                where = f"{self.url}/{name}"
                if _is_final(error):
                    raise _storage_error(f"{where}: refused", error) from error
                if time.monotonic() + delay > deadline:
                    raise _storage_error(f"{where}: gave up after {RETRY_SECONDS:.0f} s", error) from error
            time.sleep(random.uniform(0, delay))
            delay = min(delay * 2, 20.0)


def _is_final(error: Exception) -> bool:
    """Whether asking again cannot help. Client libraries raise more than OSErrors for a network that stumbles."""
    if isinstance(error, OSError):
        return isinstance(error, _FINAL_OS_ERRORS) or error.errno in _NO_ROOM
    return isinstance(error, _MISUSE) or "Credential" in type(error).__name__


def _refuse_unlisted(error: OSError) -> None:
    """What ``os.walk`` does about a folder it cannot read: silence would hide what is in it."""
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise _storage_error(f"{error.filename}: cannot list", error) from error


def _make_folder(folder: Path) -> None:
    """``mkdir -p``, with each new folder's name on the disk before anything refers to what is in it."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _storage_error(where: str, error: Any) -> StorageError:
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return StorageError(f"{where}: no space left; free some and run the same command again, nothing is lost")
    return StorageError(f"{where}: {' '.join(str(error).split()) or type(error).__name__}")
