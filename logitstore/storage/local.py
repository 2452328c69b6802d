"""A folder as a storage. Not through fsspec, whose local ``mode="create"`` races and shows partial files."""

from __future__ import annotations

import errno
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from logitstore.storage.interface import Entry, Storage, check_range
from logitstore.storage.retries import storage_error

_NOTHING_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_ATTEMPTS = 100
"""How often a folder is made again that another process emptied and removed meanwhile."""


class LocalStorage(Storage):
    """A folder. Objects are written beside it (``tmp/``), synced, then moved or linked into place."""

    def __init__(self, path: str) -> None:
        self.root = Path(path).expanduser().absolute()
        self.url = str(self.root)

    def read(self, name: str) -> bytes:
        try:
            return (self.root / name).read_bytes()
        except _NOTHING_THERE as error:
            raise FileNotFoundError(str(self.root / name)) from error
        except OSError as error:
            raise storage_error(f"{self.root / name}: cannot read", error) from error

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        try:
            with (self.root / name).open("rb", buffering=0) as file:
                data = _read_fully(file.fileno(), begin, end - begin)
        except _NOTHING_THERE as error:
            raise FileNotFoundError(str(self.root / name)) from error
        except OSError as error:
            raise storage_error(f"{self.root / name}: cannot read", error) from error
        return check_range(str(self.root / name), data, begin, end)

    def write(self, name: str, data: bytes) -> None:
        self._place(name, data, os.replace)

    def create(self, name: str, data: bytes) -> bool:
        # link() fails when the name is taken, whoever took it, and never shows a partial file.
        try:
            self._place(name, data, os.link)
        except FileExistsError:
            return False
        return True

    def delete(self, name: str) -> None:
        target = self.root / name
        try:
            target.unlink()
            with suppress(FileNotFoundError):  # another's deletion may have removed the folder
                _sync_folder(target.parent)
        except _NOTHING_THERE:
            return
        except OSError as error:
            raise storage_error(f"{target}: cannot delete", error) from error
        _remove_empty_folders(target.parent, self.root)

    def entry(self, name: str) -> Entry | None:
        try:
            found = (self.root / name).stat()
        except _NOTHING_THERE:
            return None
        except OSError as error:
            raise storage_error(f"{self.root / name}: cannot look", error) from error
        return Entry(name, found.st_size, found.st_mtime) if stat.S_ISREG(found.st_mode) else None

    def list_entries(self, prefix: str) -> Iterator[Entry]:
        for name in self.list(prefix):
            found = self.entry(name)
            if found is not None:  # else deleted since
                yield found

    def list(self, prefix: str) -> Iterator[str]:
        for folder, _, files in os.walk(self.root / prefix, onerror=_refuse_unlisted):
            for file in files:
                yield (Path(folder) / file).relative_to(self.root).as_posix()

    def child_url(self, name: str) -> str:
        return str(self.root / name)

    def sweep(self, older_than_seconds: float) -> int:
        newest, num_swept = time.time() - older_than_seconds, 0
        for entry in self.list_entries("tmp"):
            if entry.modified is not None and entry.modified < newest:
                (self.root / entry.name).unlink(missing_ok=True)
                num_swept += 1
        return num_swept

    def _place(self, name: str, data: bytes, move: Callable[[Path, Path], None]) -> None:
        target, temporary = self.root / name, self.root / "tmp" / uuid.uuid4().hex
        try:
            _make_folder(temporary.parent)
            try:
                with temporary.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                _move(temporary, target, move)
            finally:
                temporary.unlink(missing_ok=True)
            with suppress(FileNotFoundError):  # the object, and with it the folder, may be deleted by now
                _sync_folder(target.parent)
        except FileExistsError:
            raise
        except OSError as error:
            raise storage_error(f"{target}: cannot write {len(data)} bytes", error) from error


def _move(temporary: Path, target: Path, move: Callable[[Path, Path], None]) -> None:
    for _ in range(_ATTEMPTS):
        try:
            _make_folder(target.parent)
            move(temporary, target)
            return
        except FileNotFoundError:
            if not temporary.exists():
                raise
            # Another process deleted the folder's last object, and with it the folder, since it was made.
        except FileExistsError:
            # Over NFS an answer can be lost, and the second attempt refused by the first.
            if target.exists() and temporary.samefile(target):
                return
            raise
    raise FileNotFoundError(f"{target.parent} is removed again and again")


def _read_fully(descriptor: int, begin: int, num_bytes: int) -> bytes:
    pieces = []
    while num_bytes > 0:
        piece = os.pread(descriptor, num_bytes, begin)
        if not piece:
            break
        pieces.append(piece)
        begin, num_bytes = begin + len(piece), num_bytes - len(piece)
    return b"".join(pieces) if len(pieces) != 1 else pieces[0]


def _refuse_unlisted(error: OSError) -> None:
    """What ``os.walk`` does about a folder it cannot read: silence would hide what is in it."""
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise storage_error(f"{error.filename}: cannot list", error) from error


def _make_folder(folder: Path) -> None:
    """``mkdir -p``, with each new folder's name on the disk before anything refers to what is in it."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        _make_folder(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError as error:
        # Not ``exist_ok``, which calls it an error if another process has removed the folder since.
        if folder.is_file():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error
    _sync_folder(folder.parent)


def _remove_empty_folders(folder: Path, root: Path) -> None:
    """Upwards from ``folder``; those right below the root stay."""
    while root in folder.parent.parents:
        try:
            folder.rmdir()
        except OSError:
            return  # not empty, or gone by another's hand
        folder = folder.parent


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
