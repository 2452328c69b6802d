"""Records of dataset versions: numbered, created once, and dropped without freeing their number.

A dropped version leaves its record in place, with the time of the drop and without a claim on its manifest. So numbers
have no gaps, none is ever used twice, whoever races to create the next one still meets every number that was taken, and
a copy can tell later that a version was an ancestor.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

from logitstore.errors import StoreError
from logitstore.recipes import WRITER
from logitstore.records import open_record, seal_record
from logitstore.storage import Storage

_VERSION_PATH = re.compile(r"datasets/(?P<name>[^/]+)/(?P<number>[1-9][0-9]*)\.json")
SHORTEST_PIN = 8


@dataclass(frozen=True)
class VersionRecord:
    """What ``datasets/<name>/<number>.json`` says.

    Attributes:
        manifest: digest of the manifest object.
        identity: what inspect calls ``manifest_digest``.
        created: when, UTC.
        dropped: when, UTC; empty for a version that is kept.
    """

    name: str
    number: int
    manifest: str
    identity: str
    created: str
    dropped: str = ""

    @property
    def path(self) -> str:
        return version_path(self.name, self.number)


def version_path(name: str, number: int) -> str:
    return f"datasets/{name}/{number}.json"


def list_numbers(storage: Storage, name: str) -> list[int]:
    """Numbers of all versions of a dataset, dropped ones too.

    A listing may lag behind what was written. Numbers have no gaps, so later ones are found by looking for each.
    """
    numbers = [number for found, number in _listed(storage, f"datasets/{name}") if found == name]
    while storage.exists(version_path(name, following := max(numbers, default=0) + 1)):
        numbers.append(following)
    return numbers


def list_all(storage: Storage) -> list[tuple[str, int]]:
    """Name and number of all versions of all datasets, dropped ones too."""
    return sorted(_listed(storage, "datasets"))


def _listed(storage: Storage, folder: str) -> Iterator[tuple[str, int]]:
    for path in storage.list(folder):
        if match := _VERSION_PATH.fullmatch(path):
            yield match["name"], int(match["number"])


def read_version(storage: Storage, name: str, number: int) -> VersionRecord:
    """The record of a version, dropped or not.

    Raises:
        FileNotFoundError: there is none.
        DamageError: it does not match its digest.
    """
    path = version_path(name, number)
    record = open_record(storage.read(path), storage.child_url(path))
    return VersionRecord(
        name, number, record["manifest"], record["identity"], record["created"], record.get("dropped", "")
    )


def kept_versions(storage: Storage, name: str) -> Iterator[VersionRecord]:
    """The versions of a dataset that are not dropped, newest first, each read when asked for."""
    for number in sorted(list_numbers(storage, name), reverse=True):
        record = read_version(storage, name, number)
        if not record.dropped:
            yield record


def find_version(storage: Storage, name: str, number: int) -> VersionRecord:
    """A version by its number.

    Raises:
        StoreError: there is none, or it was dropped.
    """
    try:
        record = read_version(storage, name, number)
    except FileNotFoundError:
        raise StoreError(f"{storage.url}: dataset {name!r} has no version {number}") from None
    if record.dropped:
        raise StoreError(f"{storage.url}: version {number} of dataset {name!r} was dropped on {record.dropped}")
    return record


def create_version(storage: Storage, name: str, number: int, manifest: str, identity: str) -> bool:
    """Create the record of a version whose manifest is stored; False if the number is taken."""
    body = {"manifest": manifest, "identity": identity, "writer": WRITER, "created": utc_now()}
    return storage.create(version_path(name, number), seal_record(body))


def drop_version(storage: Storage, record: VersionRecord) -> None:
    """Give up a version: nothing is deleted, but ``logitstore gc`` will no longer keep what only it refers to."""
    body = {
        "manifest": record.manifest,
        "identity": record.identity,
        "writer": WRITER,
        "created": record.created,
        "dropped": utc_now(),
    }
    storage.write(record.path, seal_record(body))


def matches_pin(identity: str, pin: str) -> bool:
    """Whether a pin, a manifest digest or the beginning of one, means this identity.

    Raises:
        StoreError: the pin is too short to be meant for one manifest.
    """
    if len(pin) < SHORTEST_PIN:
        raise StoreError(f"pin {pin!r}: give at least {SHORTEST_PIN} digits of a manifest digest")
    return identity.startswith(pin.lower())


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
