"""``verify``: every digest in a store, recomputed from the bytes that are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from logitstore.columns import recipe_for
from logitstore.digests import digest_bytes, digest_json
from logitstore.errors import DamageError, StorageError, StoreError
from logitstore.manifest import Manifest
from logitstore.recipes import Answer, recipe_path
from logitstore.records import open_record
from logitstore.store import Store

_MISSING_OR_UNREADABLE = (FileNotFoundError, StorageError, DamageError)


@dataclass(frozen=True)
class Verified:
    """What was looked at.

    Attributes:
        faults: one line for each damaged or missing object, naming it.
        num_objects: records, plans, manifests and assets read.
        num_parts: parts read.
        num_uncommitted: parts that nothing refers to: what a killed or beaten writer left. No damage.
    """

    faults: tuple[str, ...]
    num_objects: int
    num_parts: int
    num_uncommitted: int


@dataclass
class _Referred:
    """What the objects of a store refer to.

    Attributes:
        parts: digests.
        objects: other objects by name; the first object that refers to each.
    """

    parts: set[str] = field(default_factory=set)
    objects: dict[str, str] = field(default_factory=dict)


def verify(store: Store, progress: Callable[[int, int], None] = lambda done, total: None) -> Verified:
    """Check everything in a store: digests of objects, digests of contents, and that nothing referred to is missing.

    Args:
        store: the store.
        progress: told (parts done, parts in all).
    """
    names = sorted(name for name in store.storage.list("") if not name.startswith("tmp/"))
    records = [name for name in names if name.endswith(".json") and not name.startswith("parts/")]
    named = [name for name in names if name.split("/")[0] in {"assets", "plans", "manifests"}]
    referred = _Referred(objects={"store.json": "every store"})
    faults = [fault for name in records for fault in _check_record(store, name, referred)]
    faults += [fault for name in named for fault in _check_named(store, name)]
    faults += [fault for name, number in store.versions() for fault in _check_version(store, name, number, referred)]
    for number, digest in enumerate(sorted(referred.parts)):
        progress(number, len(referred.parts))
        faults += store.part(digest).damage()
    progress(len(referred.parts), len(referred.parts))
    faults += _check_presence(store, set(names), referred)
    present = {name.split("/")[1] for name in names if name.startswith("parts/")}
    return Verified(
        tuple(dict.fromkeys(faults)), len(records) + len(named), len(referred.parts), len(present - referred.parts)
    )


def _check_record(store: Store, name: str, referred: _Referred) -> Iterator[str]:
    where = store.storage.child_url(name)
    try:
        record = open_record(store.storage.read(name), where)
    except _MISSING_OR_UNREADABLE as error:
        yield str(error)
        return
    if not name.startswith("recipes/"):
        return
    if f"recipes/{digest_json(record['recipe'])}.json" != name:
        yield f"{where}: answers another recipe than its name"
    result = record["result"]
    if "plan" in result:
        referred.objects.setdefault(f"plans/{result['plan']}", name)
    if "part" in result:
        referred.parts.add(result["part"])
        yield from _check_answer(store, where, result)


def _check_answer(store: Store, where: str, result: dict[str, str]) -> Iterator[str]:
    try:
        sealed = store.part(result["part"]).content
    except _MISSING_OR_UNREADABLE:
        return  # the part itself is reported with its own name
    if sealed != result["content"]:
        yield f"{where}: names content {result['content'][:16]}, its part holds {sealed[:16]}"


def _check_named(store: Store, name: str) -> Iterator[str]:
    try:
        digest = digest_bytes(store.storage.read(name))
    except _MISSING_OR_UNREADABLE as error:
        yield str(error)
        return
    if digest != name.split("/")[-1]:
        yield f"{store.storage.child_url(name)}: damaged: its digest is {digest[:16]}, not its name"


def _check_version(store: Store, name: str, number: int, referred: _Referred) -> Iterator[str]:
    """Faults of what a dataset version needs to be read at all; gathers what else it refers to."""
    path = f"datasets/{name}/{number}.json"
    try:
        manifest = store.dataset(name, number).manifest
    except (StoreError, StorageError) as error:
        yield str(error)
        return
    except (ValueError, KeyError, OSError) as error:
        yield f"{store.storage.child_url(path)}: its manifest is unreadable: {error}"
        return
    for column in manifest.columns:
        referred.parts.update(cell.part for cell in column.cells if cell is not None)
    for needed in (*_assets_of(manifest), *_recipes_of(manifest)):
        referred.objects.setdefault(needed, path)


def _check_presence(store: Store, names: set[str], referred: _Referred) -> Iterator[str]:
    for name, user in referred.objects.items():
        # What a worker has stored since the listing is there, too.
        if name not in names and not store.storage.exists(name):
            yield f"{store.storage.child_url(name)}: missing; {user} refers to it"


def _assets_of(manifest: Manifest) -> Iterator[str]:
    for column in manifest.find("tokens"):
        yield f"assets/{column.template['tokenizer']}"
        if column.template["rendering"]["template"]:
            yield f"assets/{column.template['rendering']['template']}"


def _recipes_of(manifest: Manifest) -> Iterator[str]:
    """Without its recipe a part is scored again by the next run, and nobody can tell what it is."""
    for number, block in enumerate(manifest.plan.blocks):
        cells = {column.id: column.cells[number] for column in manifest.columns}
        answers = {
            column_id: Answer({"part": cell.part, "content": cell.content}, {})
            for column_id, cell in cells.items()
            if cell is not None
        }
        for column in manifest.columns:
            recipe = recipe_for(column.template, block.digest, answers)
            if recipe is not None and column.id in answers:
                yield recipe_path(recipe)
