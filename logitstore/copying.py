"""``copy``: datasets from one store to another, only what they reach, every object checked on the way.

A copy goes on where it was killed, because it asks what is there already: a part is, when all objects of its seal are,
in their sizes. It moves objects before what refers to them, and the dataset's record last, as a producer does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from logitstore import freeing, versions
from logitstore.digests import digest_bytes
from logitstore.errors import DamageError, StoreError
from logitstore.heartbeats import alive
from logitstore.manifest import Manifest
from logitstore.parts import Part
from logitstore.reachable import Answered, blocks_of, derived, read_answered, recipes_of, targets_of
from logitstore.storage import Storage, map_threads
from logitstore.store import Store
from logitstore.versions import VersionRecord


@dataclass
class Copied:
    """What a copy did.

    Attributes:
        number: of the version at the destination, by the name there.
        num_objects: objects written.
        num_bytes: of those.
        num_skipped: objects and parts that were there already.
    """

    number: dict[str, int] = field(default_factory=dict)
    num_objects: int = 0
    num_bytes: int = 0
    num_skipped: int = 0


def copy_dataset(
    source: Store,
    destination: Store,
    record: VersionRecord,
    name: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Copied:
    """Copy a version of a dataset, as the next version of the dataset of that name at the destination.

    Nothing is published when the destination has this manifest as one of its versions already.

    Args:
        source: where from.
        destination: where to.
        record: the version.
        name: at the destination; the same if not given.
        progress: told (bytes of parts done, bytes in all).

    Raises:
        StoreError: the destination has a dataset of that name whose newest version is no ancestor of this one.
        DamageError: an object of the source is missing or damaged. What was copied stays, and is not copied again.
        FreedError: a garbage collection of the destination is freeing what was there.
    """
    name = name or record.name
    manifest = source.manifest(record.manifest)

    def work() -> Copied:
        if there := _find_there(destination, name, source, record):
            return Copied({name: there})
        copying = _Copying(source.storage, destination.storage)
        # First, so that a collection can read it: what the plan leads to is kept while this goes on.
        copying.copy_plan(manifest)
        with alive(destination.storage, manifest.plan_digest):
            copying.run(record, manifest, progress)
            copying.copied.number[name] = _publish(source, destination, name, record, manifest)
        return copying.copied

    with alive(destination.storage):
        return freeing.tried_again(work)


def _publish(source: Store, destination: Store, name: str, record: VersionRecord, manifest: Manifest) -> int:
    """Create the record of the version; another's that came first is an ancestor, or a reason to refuse."""
    while True:
        if there := _find_there(destination, name, source, record):
            return there
        number = max(versions.list_numbers(destination.storage, name), default=0) + 1
        freeing.refuse_freed(destination.storage, manifest.part_digests())
        if versions.create_version(destination.storage, name, number, record.manifest, record.identity):
            return number


def _find_there(destination: Store, name: str, source: Store, record: VersionRecord) -> int | None:
    """The destination's version with this manifest, if it has one.

    Raises:
        StoreError: its newest version is no ancestor.
    """
    kept = list(versions.kept_versions(destination.storage, name))
    for found in kept:
        if found.identity == record.identity:
            return found.number
    if not kept:
        return None
    numbers = (number for number in versions.list_numbers(source.storage, record.name) if number < record.number)
    ancestors = {versions.read_version(source.storage, record.name, number).identity for number in numbers}
    if kept[0].identity not in ancestors:
        raise StoreError(
            f"{destination.storage.url}: has another dataset {name!r}: its newest version, {kept[0].number} with "
            f"manifest {kept[0].identity[:16]}, is none of those before version {record.number} at "
            f"{source.storage.url}; copy under another name with --as"
        )
    return None


class _Copying:
    """Moves what one version reaches."""

    def __init__(self, source: Storage, destination: Storage) -> None:
        self._source, self._destination = source, destination
        self._there = {entry.name: entry.num_bytes for entry in destination.list_entries("")}
        self.copied = Copied()

    def copy_plan(self, manifest: Manifest) -> None:
        self._count(*self._copy_named(f"plans/{manifest.plan_digest}"))

    def run(self, record: VersionRecord, manifest: Manifest, progress: Callable[[int, int], None]) -> None:
        """Parts and other objects, then the records that refer to them, then the manifest."""
        sizes = _part_sizes(manifest)
        recipes = {name for name, _, _ in recipes_of(manifest)}
        others = self._other_answers(recipes, manifest)
        for answer in others:
            if answer.target.startswith("parts/"):
                sizes.setdefault(answer.target.removeprefix("parts/"), 0)
        done, total = 0, sum(sizes.values())
        progress(done, total)
        for digest, moved in zip(sizes, map_threads(self._copy_part, sizes), strict=True):
            self._count(*moved)
            done += sizes[digest]
            progress(done, total)
        named = {target for target in targets_of(record.manifest, manifest) if not target.startswith("parts/")}
        for moved in map_threads(self._copy_named, sorted(named - {f"manifests/{record.manifest}"})):
            self._count(*moved)
        for moved in map_threads(self._copy_recipe, [*sorted(recipes), *(answer.name for answer in others)]):
            self._count(*moved)
        self._count(*self._copy_named(f"manifests/{record.manifest}"))

    def _count(self, num_objects: int, num_bytes: int) -> None:
        self.copied.num_objects += num_objects
        self.copied.num_bytes += num_bytes
        self.copied.num_skipped += num_objects == 0

    def _other_answers(self, known: Iterable[str], manifest: Manifest) -> list[Answered]:
        """What later runs on this dataset will ask for besides: its plan, and what its thresholds were settled on."""
        named = set(known)
        others = [name for name in self._source.list("recipes") if name.endswith(".json") and name not in named]

        def read(name: str) -> Answered:
            return read_answered(self._source.read(name), name, self._source.child_url(name))

        answers = list(map_threads(read, sorted(others)))
        calibration = derived(answers, blocks_of(manifest.plan))
        thetas = {cell.content for column in manifest.find("tokens") for cell in column.cells if cell is not None}
        return [
            answer
            for answer in answers
            if answer.target == f"plans/{manifest.plan_digest}"
            or (answer.name in calibration and answer.kind in {"text", "tokens", "theta"})
            or (answer.kind == "theta" and set(answer.inputs) <= thetas)
        ]

    def _copy_part(self, digest: str) -> tuple[int, int]:
        part = Part(self._source, digest)
        described = part.seal["objects"]
        if self._there.get(f"{part.path}/seal.json") and all(
            self._there.get(f"{part.path}/{name}") == each["bytes"] for name, each in described.items()
        ):
            return 0, 0
        sizes = [self._copy(f"{part.path}/seal.json", digest)]
        sizes += [self._copy(f"{part.path}/{name}", each["digest"]) for name, each in sorted(described.items())]
        return len(sizes), sum(sizes)

    def _copy_named(self, name: str) -> tuple[int, int]:
        # Small, so looked at rather than trusted.
        if name in self._there and digest_bytes(self._destination.read(name)) == name.split("/")[1]:
            return 0, 0
        return 1, self._copy(name, name.split("/")[1])

    def _copy_recipe(self, name: str) -> tuple[int, int]:
        """As it is; where the destination has an answer of its own, that one stays."""
        if name in self._there:
            return 0, 0
        data = self._read(name)
        read_answered(data, name, self._source.child_url(name))
        return (1, len(data)) if self._destination.create(name, data) else (0, 0)

    def _copy(self, name: str, digest: str) -> int:
        data = self._read(name)
        if digest_bytes(data) != digest:
            raise DamageError(
                f"{self._source.child_url(name)}: damaged: its digest is not {digest[:16]}; run `logitstore verify`"
            )
        self._destination.write(name, data)
        return len(data)

    def _read(self, name: str) -> bytes:
        try:
            return self._source.read(name)
        except FileNotFoundError:
            raise DamageError(f"{self._source.child_url(name)}: missing; run `logitstore verify`") from None


def _part_sizes(manifest: Manifest) -> dict[str, int]:
    """Stored bytes by part."""
    return {cell.part: cell.num_bytes for column in manifest.columns for cell in column.cells if cell is not None}
