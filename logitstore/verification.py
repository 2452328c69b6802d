"""``verify``: every digest in a store, recomputed from the bytes that are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from logitstore.digests import digest_bytes, digest_json
from logitstore.errors import DamageError
from logitstore.records import open_record
from logitstore.store import Store


@dataclass(frozen=True)
class Verified:
    """What was looked at.

    Attributes:
        faults: one line for each damaged or missing object, naming it.
        num_objects: records, plans, manifests and assets read.
        num_parts: parts read.
        num_uncommitted: parts that no recipe refers to: what a killed or beaten writer left. No damage.
    """

    faults: tuple[str, ...]
    num_objects: int
    num_parts: int
    num_uncommitted: int


def verify(store: Store, progress: Callable[[int, int], None] = lambda done, total: None) -> Verified:
    """Check everything in a store: digests of objects, digests of contents, and that nothing referred to is missing.

    Args:
        store: the store.
        progress: told (parts done, parts in all).
    """
    names = sorted(name for name in store.storage.list("") if not name.startswith("tmp/"))
    faults, referred = _check_records(store, [n for n in names if n.endswith(".json") and not n.startswith("parts/")])
    named = [name for name in names if name.split("/")[0] in {"assets", "plans", "manifests"}]
    faults += [fault for name in named if (fault := _check_named(store, name))]
    present = {name.split("/")[1] for name in names if name.startswith("parts/")}
    for number, digest in enumerate(sorted(referred)):
        progress(number, len(referred))
        faults += store.part(digest).damage()
    progress(len(referred), len(referred))
    faults += list(_check_references(store))
    num_records = sum(name.endswith(".json") and not name.startswith("parts/") for name in names)
    return Verified(tuple(dict.fromkeys(faults)), num_records + len(named), len(referred), len(present - referred))


def _check_records(store: Store, names: list[str]) -> tuple[list[str], set[str]]:
    """Faults of records, and the parts that recipes refer to."""
    faults, referred = [], set()
    for name in names:
        try:
            record = open_record(store.storage.read(name), store.storage.child_url(name))
        except DamageError as error:
            faults.append(str(error))
            continue
        if not name.startswith("recipes/"):
            continue
        if f"recipes/{digest_json(record['recipe'])}.json" != name:
            faults.append(f"{store.storage.child_url(name)}: answers another recipe than its name")
        if "part" in record["result"]:
            referred.add(record["result"]["part"])
            faults += _check_answer(store, name, record["result"])
    return faults, referred


def _check_answer(store: Store, name: str, result: dict[str, str]) -> Iterator[str]:
    try:
        sealed = store.part(result["part"]).content
    except DamageError:
        return  # the part itself is reported with its own name
    if sealed != result["content"]:
        yield f"{store.storage.child_url(name)}: names content {result['content'][:16]}, its part holds {sealed[:16]}"


def _check_named(store: Store, name: str) -> str | None:
    digest = digest_bytes(store.storage.read(name))
    if digest == name.split("/")[-1]:
        return None
    return f"{store.storage.child_url(name)}: damaged: its digest is {digest[:16]}, not its name"


def _check_references(store: Store) -> Iterator[str]:
    """What dataset versions refer to must be there; whether it is whole was checked above."""
    for dataset, newest in store.datasets().items():
        for number in range(1, newest + 1):
            try:
                version = store.dataset(dataset, number)
            except DamageError as error:
                yield str(error)
                continue
            except (ValueError, KeyError, OSError) as error:
                where = store.storage.child_url(f"datasets/{dataset}/{number}.json")
                yield f"{where}: its manifest is unreadable: {error}"
                continue
            parts = {cell.part for column in version.manifest.columns for cell in column.cells if cell is not None}
            assets = _assets_of(version.manifest.columns)
            paths = [f"parts/{part}/seal.json" for part in sorted(parts)] + [
                f"assets/{asset}" for asset in sorted(assets)
            ]
            for path in paths:
                if not store.storage.exists(path):
                    where = store.storage.child_url(path)
                    yield f"{where}: missing; version {number} of dataset {dataset!r} refers to it"


def _assets_of(columns: tuple) -> set[str]:
    assets = set()
    for column in columns:
        if column.kind == "tokens":
            assets.add(column.template["tokenizer"])
            if column.template["rendering"]["template"]:
                assets.add(column.template["rendering"]["template"])
    return assets
