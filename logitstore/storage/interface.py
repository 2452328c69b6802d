"""What the store asks of a place to keep objects in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from logitstore.errors import DamageError


@dataclass(frozen=True)
class Entry:
    """An object as a listing shows it.

    Attributes:
        name: relative to the storage.
        num_bytes: its size.
        modified: seconds since 1970 by the storage's clock; None where it does not say.
    """

    name: str
    num_bytes: int
    modified: float | None


class Storage(ABC):
    """A flat name space of immutable objects; names are ``/``-separated and relative to ``url``.

    All methods may be called from several threads at once, and after a fork.
    """

    url: str

    @abstractmethod
    def read(self, name: str) -> bytes:
        """All bytes of an object. Raises FileNotFoundError when there is none."""

    @abstractmethod
    def read_range(self, name: str, begin: int, end: int) -> bytes | memoryview:
        """Bytes ``begin`` to ``end`` (exclusive) of an object, perhaps in a buffer of a client's own.

        Raises:
            FileNotFoundError: there is no such object.
            DamageError: the object ends before ``end``.
        """

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Put an object, replacing any: a reader sees all of it or none."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Put an object only if there is none of that name; False if there was.

        False never proves another writer: when an answer is lost, the second attempt is refused by the first. Read
        the object back to know whose it is.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object; no error if there is none."""

    @abstractmethod
    def entry(self, name: str) -> Entry | None:
        """Size and age of an object, or None when there is none. A folder is no object."""

    @abstractmethod
    def list_entries(self, prefix: str) -> Iterator[Entry]:
        """All objects below the folder ``prefix``, in no order."""

    @abstractmethod
    def child_url(self, name: str) -> str:
        """The URL of an object or folder, as ``zarr.open_group`` takes it."""

    def read_whole(self, name: str, num_bytes: int) -> bytes | memoryview:
        """All bytes of an object that is to have ``num_bytes``, perhaps in a buffer of a client's own.

        Raises:
            FileNotFoundError: there is no such object.
            DamageError: it is longer or shorter.
        """
        data = self.read(name)
        if len(data) != num_bytes:
            raise DamageError(
                f"{self.child_url(name)}: damaged: {num_bytes} bytes were sealed, {len(data)} found; run `logitstore "
                "verify`"
            )
        return data

    def exists(self, name: str) -> bool:
        """Whether there is an object of that name. A folder is no object."""
        return self.entry(name) is not None

    def list(self, prefix: str) -> Iterator[str]:
        """Names of all objects below the folder ``prefix``, in no order."""
        return (entry.name for entry in self.list_entries(prefix))

    def sweep(self, older_than_seconds: float) -> int:
        """Remove what killed writers left half written, if it is older than that; returns how many files."""
        return 0


def check_range(where: str, data: bytes, begin: int, end: int) -> bytes:
    """``data``, if it is all of the range that was asked for."""
    if len(data) != end - begin:
        raise DamageError(
            f"{where}: bytes {begin} to {end} asked for, {len(data)} found: the object is shorter than what refers "
            "to it says; run `logitstore verify`"
        )
    return data
