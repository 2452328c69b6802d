"""Pins: manifests that a user relies on, by digest, whatever becomes of the dataset version that named them.

``pins/<manifest digest>.json`` is a root of garbage collection: what a pinned manifest refers to is kept even when its
version is dropped, and the version can still be opened by its pin.
"""

from __future__ import annotations

from dataclasses import dataclass

from logitstore import versions
from logitstore.errors import StoreError
from logitstore.recipes import WRITER
from logitstore.records import open_record, seal_record
from logitstore.storage import Storage
from logitstore.versions import VersionRecord

FOLDER = "pins"


@dataclass(frozen=True)
class Pin:
    """A pinned manifest: the version that it was when it was pinned."""

    identity: str
    manifest: str
    name: str
    number: int
    created: str

    @property
    def path(self) -> str:
        return f"{FOLDER}/{self.identity}.json"


def pin(storage: Storage, record: VersionRecord) -> Pin:
    """Keep a version's manifest whatever becomes of the version; pinning twice changes nothing."""
    made = Pin(record.identity, record.manifest, record.name, record.number, versions.utc_now())
    body = {
        "identity": made.identity,
        "manifest": made.manifest,
        "dataset": made.name,
        "version": made.number,
        "created": made.created,
        "writer": WRITER,
    }
    storage.create(made.path, seal_record(body))
    return read_pin(storage, made.path)


def unpin(storage: Storage, found: Pin) -> None:
    storage.delete(found.path)


def read_pin(storage: Storage, path: str) -> Pin:
    """Raises: DamageError: the record does not match its digest."""
    body = open_record(storage.read(path), storage.child_url(path))
    return Pin(body["identity"], body["manifest"], body["dataset"], body["version"], body["created"])


def list_pins(storage: Storage) -> list[Pin]:
    return [read_pin(storage, path) for path in sorted(storage.list(FOLDER)) if path.endswith(".json")]


def find_pinned(storage: Storage, name: str, number: int | None, wanted: str) -> VersionRecord:
    """The version of a dataset with this manifest digest, the newest such; also one that is dropped but pinned.

    Args:
        storage: of the store.
        name: of the dataset.
        number: of the version, if it must be that one.
        wanted: the digest, or the beginning of it.

    Raises:
        StoreError: no version has it.
    """
    if number is not None:
        record = versions.find_version(storage, name, number)
        if not versions.matches_pin(record.identity, wanted):
            raise StoreError(
                f"{storage.url}: version {number} of dataset {name!r} has manifest {record.identity}, not the pinned "
                f"{wanted}"
            )
        return record
    newest = ""
    for record in versions.kept_versions(storage, name):
        if versions.matches_pin(record.identity, wanted):
            return record
        newest = newest or f"; its newest, version {record.number}, has {record.identity}"
    for found in list_pins(storage):
        if found.name == name and versions.matches_pin(found.identity, wanted):
            return VersionRecord(name, found.number, found.manifest, found.identity, found.created)
    raise StoreError(f"{storage.url}: dataset {name!r} has no version with manifest {wanted}{newest}")
