"""``verify``: every digest in a store, or of a dataset, or of a sample of the parts, recomputed from what is there."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from logitstore import freeing, heartbeats
from logitstore.digests import digest_bytes
from logitstore.errors import DamageError, StorageError, StoreError
from logitstore.plan import Plan
from logitstore.reachable import Answered, read_answered, recipes_of, targets_of
from logitstore.records import open_record
from logitstore.storage import map_threads
from logitstore.store import Store
from logitstore.versions import list_all, read_version, version_path

_MISSING_OR_UNREADABLE = (FileNotFoundError, StorageError, DamageError)
_NAMED_BY_DIGEST = ("assets", "plans", "manifests", "pages")
_PASSING = (f"{freeing.FOLDER}/", f"{heartbeats.FOLDER}/", "collecting.json")
"""Records that come and go while a store is in use: that one of them is gone is no damage."""


@dataclass(frozen=True)
class Fault:
    """Something damaged or missing.

    Attributes:
        target: what a repair would mend: ``parts/<digest>``, or the name of an object.
        message: one line that names it.
    """

    target: str
    message: str


@dataclass(frozen=True)
class Verified:
    """What was looked at.

    Attributes:
        damage: what is damaged or missing.
        num_objects: records, plans, manifests, pages and assets read.
        num_parts: parts read.
        num_left_out: parts that a sample left out.
        num_uncommitted: parts that nothing refers to: what a killed or beaten writer left. No damage.
        leading: by target, the names of the recipes' records that lead to it.
    """

    damage: tuple[Fault, ...]
    num_objects: int
    num_parts: int
    num_left_out: int
    num_uncommitted: int
    leading: dict[str, set[str]]

    @property
    def faults(self) -> tuple[str, ...]:
        """One line for each fault, naming the object."""
        return tuple(dict.fromkeys(fault.message for fault in self.damage))


def verify(
    store: Store,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    dataset: str | None = None,
    sample: float = 100.0,
    seed: int | None = None,
) -> Verified:
    """Check digests of objects, digests of contents, and that nothing referred to is missing.

    Args:
        store: the store.
        progress: told (parts done, parts in all).
        dataset: only what the versions of this one refer to; everything in the store if not given.
        sample: per cent of the parts to read, chosen at random. Everything else is small and is always checked.
        seed: of the choice; another one every time if not given.

    Raises:
        StoreError: there is no such dataset.
    """
    checking = _Checking(store)
    names = checking.begin(dataset)
    parts = sorted(checking.parts)
    chosen = parts
    if sample < 100:
        chosen = sorted(random.Random(seed).sample(parts, math.ceil(len(parts) * sample / 100)))
    progress(0, len(chosen))
    for number, faults in enumerate(map_threads(checking.check_part, chosen)):
        checking.damage += faults
        progress(number + 1, len(chosen))
    checking.check_presence(names)
    present = {name.split("/")[1] for name in names if name.startswith("parts/")} if dataset is None else set()
    return Verified(
        tuple(dict.fromkeys(checking.damage)),
        checking.num_objects,
        len(chosen),
        len(parts) - len(chosen),
        len(present - checking.parts.keys()),
        checking.leading,
    )


@dataclass
class _Checking:
    """One verification.

    Attributes:
        parts: by digest, (who refers to it, the content expected).
        referred: other objects by name; the first object that refers to each.
    """

    store: Store
    damage: list[Fault] = field(default_factory=list)
    parts: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    referred: dict[str, str] = field(default_factory=lambda: {"store.json": "every store"})
    leading: dict[str, set[str]] = field(default_factory=dict)
    num_objects: int = 0

    def begin(self, dataset: str | None) -> set[str]:
        """Check all but parts; returns the names that are there."""
        storage = self.store.storage
        # Listed before versions are: whatever a version refers to was stored before it.
        listed = [name for name in storage.list("") if not name.startswith("tmp/")] if dataset is None else []
        self._check_versions(dataset)
        if dataset is None:
            records = [name for name in listed if name.endswith(".json") and not name.startswith("parts/")]
            named = [name for name in listed if name.split("/")[0] in _NAMED_BY_DIGEST]
        else:
            present = [name for name in self.referred if storage.exists(name)]
            records = [name for name in present if name.endswith(".json")]
            named = [name for name in present if not name.endswith(".json")]
        for faults in map_threads(self._check_record, sorted(set(records))):
            self.damage += faults
        for faults in map_threads(self._check_named, sorted(named)):
            self.damage += faults
        self.num_objects = len(records) + len(named)
        return set(listed or [*records, *named])

    def _check_versions(self, dataset: str | None) -> None:
        """The records of versions, their manifests, and what those refer to."""
        storage = self.store.storage
        numbers = [(name, number) for name, number in list_all(storage) if dataset in {None, name}]
        if dataset is not None and not numbers:
            known = ", ".join(self.store.datasets()) or "none yet"
            raise StoreError(f"{storage.url}: no dataset {dataset!r}; there are: {known}")
        newest = dict(numbers)  # listed in order
        for name, last in newest.items():
            for number in sorted(set(range(1, last)) - {number for other, number in numbers if other == name}):
                message = f"missing; version {last} came after it, and a dropped version leaves its record"
                self._add(version_path(name, number), f"{storage.child_url(version_path(name, number))}: {message}")
        for name, number in numbers:
            self._check_version(name, number)

    def _check_version(self, name: str, number: int) -> None:
        path, storage = version_path(name, number), self.store.storage
        self.referred.setdefault(path, f"dataset {name!r}")
        try:
            record = read_version(storage, name, number)
        except _MISSING_OR_UNREADABLE as error:
            self._add(path, str(error))
            return
        if record.dropped:
            return
        self.referred.setdefault(f"manifests/{record.manifest}", path)

        def read_plan(digest: str) -> Plan:
            self.referred.setdefault(f"plans/{digest}", path)
            return self.store.plan(digest)

        try:
            manifest = self.store.manifest(record.manifest, read_plan)
            for target in targets_of(record.manifest, manifest):
                if not target.startswith("parts/"):
                    self.referred.setdefault(target, path)
            for recipe, part, content in recipes_of(manifest):
                self.referred.setdefault(recipe, path)
                self._expect(part, path, content)
                self.leading.setdefault(f"parts/{part}", set()).add(recipe)
        except (StoreError, StorageError):
            return  # damage of the manifest or of its plan, found where those are read
        except (ValueError, KeyError, OSError) as error:
            self._add(f"manifests/{record.manifest}", f"{storage.child_url(path)}: its manifest is unreadable: {error}")

    def _expect(self, part: str, user: str, content: str) -> None:
        self.parts.setdefault(part, set()).add((user, content))

    def _check_record(self, name: str) -> list[Fault]:
        storage = self.store.storage
        try:
            data = storage.read(name)
            if not name.startswith("recipes/"):
                open_record(data, storage.child_url(name))
                return []
            answer = read_answered(data, name, storage.child_url(name))
        except FileNotFoundError:
            return []  # gone since the listing; if anything refers to it, it is missed below
        except _MISSING_OR_UNREADABLE as error:
            return [] if name.startswith(_PASSING) and not storage.exists(name) else [Fault(name, str(error))]
        self._follow(answer)
        return []

    def _follow(self, answer: Answered) -> None:
        self.leading.setdefault(answer.target, set()).add(answer.name)
        folder, _, digest = answer.target.partition("/")
        if folder == "parts":
            self._expect(digest, answer.name, answer.content)
        elif folder in {"plans", "assets"}:
            self.referred.setdefault(answer.target, answer.name)

    def _check_named(self, name: str) -> list[Fault]:
        where = self.store.storage.child_url(name)
        try:
            digest = digest_bytes(self.store.storage.read(name))
        except FileNotFoundError:
            return []  # a collection freed it since the listing, or it is missed below
        except _MISSING_OR_UNREADABLE as error:
            return [Fault(name, str(error))]
        if digest != name.split("/")[-1]:
            return [Fault(name, f"{where}: damaged: its digest is {digest[:16]}, not its name")]
        return []

    def check_part(self, digest: str) -> list[Fault]:
        part = self.store.part(digest)
        faults = [Fault(part.path, message) for message in part.damage()]
        if faults:
            return faults if self._is_wanted(digest) else []
        return [
            Fault(user, f"{self.store.storage.child_url(user)}: names content {content[:16]}, its part holds {sealed}")
            for sealed in [part.content[:16]]
            for user, content in sorted(self.parts[digest])
            if content != part.content
        ]

    def _is_wanted(self, digest: str) -> bool:
        """Whether anything still refers to a part: a collection may have freed it while this went on."""
        return any(self.store.storage.exists(user) for user, _ in self.parts[digest])

    def check_presence(self, names: Iterable[str]) -> None:
        known = set(names)
        for name, user in self.referred.items():
            # What a worker has stored since the listing is there, too; what a collection freed, nothing refers to.
            if name not in known and not self.store.storage.exists(name) and self._still_refers(user):
                self._add(name, f"{self.store.storage.child_url(name)}: missing; {user} refers to it")

    def _still_refers(self, user: str) -> bool:
        return "/" not in user or self.store.storage.exists(user)

    def _add(self, target: str, message: str) -> None:
        self.damage.append(Fault(target, message))


def faults_by_target(found: Verified) -> Iterator[tuple[str, list[Fault]]]:
    """The damage in the order it was found, all faults of a target together."""
    grouped: dict[str, list[Fault]] = {}
    for fault in found.damage:
        grouped.setdefault(fault.target, []).append(fault)
    yield from grouped.items()
