"""``verify --repair``: give up damaged answers, so that ``produce`` redoes exactly those; or restore them from a copy.

A manifest is never given up, nor anything else that cannot be made again from what the store and its user have.
Whatever is dropped is marked first (``dropped``), because a producer takes what is answered from the newest manifest.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from logitstore.digests import digest_bytes
from logitstore.dropped import mark_dropped
from logitstore.errors import DamageError, StorageError, StoreError
from logitstore.parts import Part
from logitstore.reachable import read_answered
from logitstore.records import open_record
from logitstore.storage import Storage
from logitstore.store import Store
from logitstore.verification import Verified, faults_by_target

_UNREADABLE = (FileNotFoundError, StorageError, DamageError)


@dataclass
class Repaired:
    """What a repair did.

    Attributes:
        restored: targets that are whole again, from the other store or from what this one has.
        dropped: targets that were given up; ``produce`` makes them again.
        beyond: for each target that is still damaged, what to do about it.
    """

    restored: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    beyond: dict[str, str] = field(default_factory=dict)


def repair(
    store: Store,
    found: Verified,
    source: Storage | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Repaired:
    """Mend what a verification found.

    Args:
        store: the damaged one.
        found: by ``verify``, of all of the store or of a dataset.
        source: another store, to restore exact content from. What it does not have whole is dropped.
        progress: told (targets done, targets in all).
    """
    repaired, mending = Repaired(), list(faults_by_target(found))
    # Parts before the records that refer to them, those before the versions.
    mending.sort(key=lambda item: _ORDER.index(item[0].split("/")[0]) if item[0].split("/")[0] in _ORDER else 0)
    for number, (target, _) in enumerate(mending):
        if _is_restored(store, source, target):
            repaired.restored.append(target)
        elif _drop(store.storage, target, found.leading):
            repaired.dropped.append(target)
        else:
            repaired.beyond[target] = _ADVICE.get(target.split("/")[0], _FROM)
        progress(number + 1, len(mending))
    return repaired


_ORDER = ("assets", "plans", "pages", "parts", "recipes", "manifests", "datasets")
_FROM = "restore it with `logitstore verify --repair --from URL` from a copy of the store"
_ADVICE = {
    "assets": f"run `logitstore produce` again with the same teachers and tokenizers, or {_FROM}",
    "plans": f"run `logitstore produce` again with the same --data, or {_FROM}",
    "manifests": f"{_FROM}, or give the version up with `logitstore dataset drop`",
    "datasets": f"{_FROM}, or give the version up with `logitstore dataset drop`",
    "pins": "delete this file, and pin the version again",
}


def _drop(storage: Storage, target: str, leading: dict[str, set[str]]) -> bool:
    """Give up an answer; False for what cannot be made again, which is left as it is."""
    folder, _, rest = target.partition("/")
    if folder == "parts":
        mark_dropped(storage, rest)
        for name in leading.get(target, ()):
            storage.delete(name)
        # Without its seal a part is not there, whatever a kill leaves of the rest.
        storage.delete(f"{target}/seal.json")
        for name in list(storage.list(target)):
            storage.delete(name)
    elif folder == "recipes":
        for answer, names in leading.items():
            if target in names and answer.startswith("parts/"):
                mark_dropped(storage, answer.removeprefix("parts/"))
        storage.delete(target)
    elif folder in {"gc", "heartbeats"}:
        storage.delete(target)
    elif folder == "assets" and target in leading:  # vocabulary maps, which are made again when they are asked for
        for name in leading[target]:
            storage.delete(name)
        storage.delete(target)
    elif folder == "plans":
        for name in leading.get(target, ()):  # so that the corpus is read again
            storage.delete(name)
        return False
    else:
        return False
    return True


def _is_restored(store: Store, source: Storage | None, target: str) -> bool:
    if source is not None and _restore(store.storage, source, target):
        return True
    return target.startswith("pages/") and _remake_page(store, target)


def _remake_page(store: Store, target: str) -> bool:
    """Write a manifest's pages again: they say nothing but what its parts' seals say. Whether that mended this one."""
    for name, number in store.versions():
        with suppress(StoreError, StorageError):  # dropped, or damaged itself
            manifest = store.dataset(name, number).manifest
            if any(target == f"pages/{page}" for column in manifest.columns for page in column.page_digests()):
                store.remake_pages(manifest)
                break
    with suppress(FileNotFoundError):
        return _is_whole(store.storage, target, store.storage.read(target))
    return False


def _restore(storage: Storage, source: Storage, target: str) -> bool:
    """Put what another store has of a target in its place; whether it is whole now."""
    folder, _, rest = target.partition("/")
    try:
        if folder == "parts":
            return _restore_part(storage, source, rest)
        data = source.read(target)
        if not _is_whole(storage, target, data):
            return False
        _put(storage, target, data)
    except _UNREADABLE:
        return False
    return True


def _is_whole(storage: Storage, name: str, data: bytes) -> bool:
    """Whether bytes are what a name promises, and what they refer to is here.

    Raises:
        DamageError: they are no record.
    """
    folder, _, rest = name.partition("/")
    if not name.endswith(".json"):
        return digest_bytes(data) == rest
    record = open_record(data, name)
    if folder == "recipes":
        target = read_answered(data, name, name).target
        if not target.startswith("parts/"):
            return target == name or storage.exists(target)
        return Part(storage, target.removeprefix("parts/")).content == record["result"]["content"]
    if folder == "datasets":
        return digest_bytes(storage.read(f"manifests/{record['manifest']}")) == record["manifest"]
    return name == "store.json"


def _restore_part(storage: Storage, source: Storage, digest: str) -> bool:
    """Object by object, so that little is moved for one that is damaged; the seal proves each."""
    original = Part(source, digest)
    objects = {"seal.json": digest} | {name: each["digest"] for name, each in original.seal["objects"].items()}
    for name, expected in objects.items():
        path = f"{original.path}/{name}"
        with suppress(*_UNREADABLE):
            if digest_bytes(storage.read(path)) == expected:
                continue
        data = source.read(path)
        if digest_bytes(data) != expected:
            return False
        _put(storage, path, data)
    return not Part(storage, digest).damage()


def _put(storage: Storage, name: str, data: bytes) -> None:
    storage.write(name, data)
    if storage.read(name) != data:
        raise DamageError(f"{storage.child_url(name)}: reads back otherwise than it was written; is the disk failing?")
