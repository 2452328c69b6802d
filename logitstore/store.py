"""A store: plans, parts, recipes, assets, manifests and named datasets under one URL."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from logitstore import freeing, pins, recipes, versions
from logitstore.digests import DIGEST_NAME, digest_bytes
from logitstore.errors import DamageError, StoreError
from logitstore.indexing import PageStore, with_pages
from logitstore.manifest import Column, Manifest
from logitstore.page_cache import PageCache
from logitstore.parts import Part
from logitstore.plan import Plan
from logitstore.recipes import Answer, Recipe
from logitstore.records import open_record, seal_record
from logitstore.staging import StagedPart, upload
from logitstore.storage import Storage, open_storage
from logitstore.urls import public_url

FORMAT = 1


@dataclass(frozen=True)
class DatasetVersion:
    """A named, numbered version of a dataset."""

    name: str
    number: int
    manifest: Manifest


class Store:
    """Reads and writes one store. All methods may be called from several threads and processes at once."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._pages = PageCache(lambda digest: self._get("pages", digest))

    @classmethod
    def open(cls, url: str) -> Store:
        """An existing store.

        Raises:
            StoreError: there is none at ``url``, or it is of a newer format.
        """
        storage = open_storage(url)
        try:
            data = storage.read("store.json")
        except FileNotFoundError:
            raise StoreError(
                f"{public_url(url)}: no store here (no store.json); `logitstore produce` makes one"
            ) from None
        _refuse_newer_format(data, public_url(url))
        open_record(data, storage.child_url("store.json"))
        return cls(storage)

    @classmethod
    def open_or_create(cls, url: str) -> Store:
        """The store at ``url``, made if there is nothing.

        Raises:
            StoreError: something else is there already, or the file system overwrites what it was asked to create.
        """
        storage = open_storage(url)
        if not storage.exists("store.json"):
            stranger = next((name for name in storage.list("") if not name.startswith("tmp/")), None)
            # A store's first object is store.json: if it is there by now, another process made the store meanwhile.
            if stranger is not None and not storage.exists("store.json"):
                raise StoreError(f"{public_url(url)}: not empty and not a store (found {stranger}); name another place")
            header = seal_record({"format": FORMAT, "digest_name": DIGEST_NAME})
            storage.create("store.json", header)
            if storage.create("store.json", header):
                raise StoreError(
                    f"{public_url(url)}: overwrites objects that it was asked to create only if absent, so racing "
                    "workers would lose each other's work; name another place"
                )
        return cls.open(url)

    # Recipes and parts

    def answer(self, recipe: Recipe) -> Answer | None:
        """The stored answer to ``recipe``, or None."""
        return recipes.find_answer(self.storage, recipe)

    def commit_part(
        self, recipe: Recipe, part: StagedPart, stats: Mapping[str, int], provenance: Mapping[str, Any]
    ) -> Answer:
        """Upload a part, then create the answer that refers to it; returns the answer that won."""
        if freeing.is_sentenced(self.storage, part.digest):
            part = freeing.renamed(part)
        upload(self.storage, part)
        sizes = {f"bytes.{name}": size for name, size in part.array_bytes().items()}
        answer = Answer({"part": part.digest, "content": part.content}, {**stats, **sizes})
        return recipes.commit_answer(self.storage, recipe, answer, provenance)

    def commit_result(self, recipe: Recipe, result: dict[str, str], provenance: Mapping[str, Any]) -> Answer:
        """Create an answer that is not a part (a plan, a threshold); returns the answer that won."""
        return recipes.commit_answer(self.storage, recipe, Answer(result, {}), provenance)

    def part(self, digest: str) -> Part:
        return Part(self.storage, digest)

    # Objects named by the digest of their bytes

    def put_asset(self, data: bytes) -> str:
        """Store a tokenizer, a template, ...; returns its digest."""
        return self._put("assets", data)

    def asset(self, digest: str) -> bytes:
        return self._get("assets", digest)

    def put_plan(self, plan: Plan) -> str:
        return self._put("plans", plan.to_parquet())

    def plan(self, digest: str) -> Plan:
        return Plan.from_parquet(self._get("plans", digest))

    def _put(self, folder: str, data: bytes) -> str:
        digest = digest_bytes(data)
        self.storage.write(f"{folder}/{digest}", data)
        return digest

    def _get(self, folder: str, digest: str) -> bytes:
        where = self.storage.child_url(f"{folder}/{digest}")
        try:
            data = self.storage.read(f"{folder}/{digest}")
        except FileNotFoundError:
            raise DamageError(f"{where}: missing; run `logitstore verify`") from None
        if digest_bytes(data) != digest:
            raise DamageError(f"{where}: damaged: its digest is not its name; run `logitstore verify`")
        return data

    # Datasets

    def datasets(self) -> dict[str, int]:
        """Names of the datasets, each with the number of its newest version."""
        names = sorted({name for name, _ in self.versions()})
        newest = ((name, next(versions.kept_versions(self.storage, name), None)) for name in names)
        return {name: record.number for name, record in newest if record is not None}

    def versions(self) -> list[tuple[str, int]]:
        """Name and number of all versions of all datasets; those that were dropped too, whose numbers stay taken."""
        return versions.list_all(self.storage)

    def dataset(self, name: str, number: int | None = None, *, pin: str | None = None) -> DatasetVersion:
        """A version of a dataset, the newest by default.

        Args:
            name: of the dataset.
            number: of the version.
            pin: its manifest digest, or the beginning of it; another version is refused.

        Raises:
            StoreError: there is no such dataset or version; names those there are.
        """
        if pin is not None:
            record = pins.find_pinned(self.storage, name, number, pin)
        elif number is not None:
            record = versions.find_version(self.storage, name, number)
        else:
            newest = self.find_dataset(name)
            if newest is None:
                known = ", ".join(self.datasets()) or "none yet"
                raise StoreError(f"{self.storage.url}: no dataset {name!r}; there are: {known}")
            return newest
        return DatasetVersion(name, record.number, self.manifest(record.manifest))

    def find_dataset(self, name: str) -> DatasetVersion | None:
        """The newest version of a dataset, or None; looks at no other dataset."""
        record = next(versions.kept_versions(self.storage, name), None)
        return DatasetVersion(name, record.number, self.manifest(record.manifest)) if record else None

    def manifest(self, digest: str, read_plan: Callable[[str], Plan] | None = None) -> Manifest:
        """A manifest by its digest; ``read_plan`` maps a plan's digest to the plan, if not as ``plan`` does."""
        return Manifest.from_parquet(self._get("manifests", digest), read_plan or self.plan)

    def publish(self, name: str, change: Callable[[Manifest | None], Manifest]) -> DatasetVersion:
        """Make the next version of a dataset.

        Args:
            name: of the dataset; letters, digits, ``.``, ``_`` and ``-``.
            change: newest manifest (None if there is none) to the next. Called again on the winner when another
                process published first; if it changes nothing, there is no new version.

        Raises:
            FreedError: a part that the newest version does not have is missing, or being freed.
        """
        check_dataset_name(name)
        while True:
            last = max(versions.list_numbers(self.storage, name), default=0)
            newest = next(versions.kept_versions(self.storage, name), None)
            current = self.manifest(newest.manifest) if newest else None
            manifest = change(current)
            if newest is not None and current is not None and _same(current, manifest):
                return DatasetVersion(name, newest.number, current)
            manifest = self._with_pages(manifest, current)
            digest = self._put("manifests", manifest.to_parquet())
            freeing.refuse_freed(self.storage, manifest.part_digests() - (current.part_digests() if current else set()))
            if versions.create_version(self.storage, name, last + 1, digest, manifest.identity):
                return DatasetVersion(name, last + 1, manifest)

    def remake_pages(self, manifest: Manifest) -> None:
        """Write the index pages of a manifest again, from the seals of its parts."""
        self._with_pages(manifest, None)

    def _with_pages(self, manifest: Manifest, current: Manifest | None) -> Manifest:
        pages = PageStore(self.storage, self._pages.page, lambda data: self._put("pages", data))
        return with_pages(pages, manifest, current)

    def column_part(self, column: Column, block: int) -> Part:
        """A column's part for a block.

        Raises:
            StoreError: the column has no answer for it.
        """
        if not column.cells.answered[block]:
            raise StoreError(
                f"{column.kind} {column.label!r}: block {block} has no answer yet; run `logitstore produce`"
            )
        place = column.page_of(block)
        index = self._pages.page(place[0]).index(place[1], column.schemas) if place else None
        return Part(self.storage, column.cells.part(block), index)


def _refuse_newer_format(header: bytes, where: str) -> None:
    # Before its digest is checked: another format may well make its digests otherwise.
    try:
        found = json.loads(header)["format"]
    except (ValueError, KeyError, TypeError):
        return  # not a newer format but a damaged record, which its digest says better
    if isinstance(found, int) and found > FORMAT:
        raise StoreError(
            f"{where}: a store of format {found}; this version of logitstore reads formats up to {FORMAT}: "
            "upgrade logitstore"
        )


def check_dataset_name(name: str) -> None:
    if not name or not all(char.isalnum() or char in "._-" for char in name) or name.startswith("."):
        raise StoreError(f"dataset name {name!r}: only letters, digits, '.', '_' and '-', and not '.' first")


def _same(a: Manifest, b: Manifest) -> bool:
    return a.identity == b.identity and _names(a) == _names(b)


def _names(manifest: Manifest) -> list[tuple[str, str, bytes]]:
    """What a version is besides its identity: labels, and parts, which a repair makes anew with the same content."""
    return sorted((column.id, column.label, column.cells.parts.tobytes()) for column in manifest.columns)
