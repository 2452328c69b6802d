"""Parts: immutable Zarr v3 groups, each the answer to one recipe.

A part is staged in memory, sealed, and uploaded under ``parts/<digest>/``, where the digest is that of its seal:

    seal.json            {format, kind, content, arrays: {name: its zarr.json}, objects: {name: {bytes, digest}}}
    zarr.json            the group, with its kind and attributes
    <array>/zarr.json
    <array>/c/...        one object an array: a shard of chunks of one column, zstd, CRC32C; or, of signals, a chunk
                         of logitstore's own codecs

The seal lists the digest of every object, so the name proves all bytes below it, two writers of one name write the same
bytes, and a part never mixes two encodings. ``content`` is the digest of the decoded values: the identity that
recipes and manifests use, which no codec or library version changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from logitstore.codecs import SPARSE_ROWS
from logitstore.dense_arrays import decode_dense
from logitstore.digests import digest_bytes
from logitstore.errors import DamageError, StorageError, StoreError
from logitstore.part_index import IndexedArray, PartIndex, index_of_seal
from logitstore.reading import check_end, read_object
from logitstore.sparse import DEFAULT_STEP_NATS, SparseRows
from logitstore.staging import content_digest
from logitstore.storage import Storage


class Part:
    """A stored part. Every byte it hands out was checked against the seal, and the seal against the part's name.

    Args:
        storage: where it lies.
        digest: its name.
        index: what its seal says of its arrays, for those who know it; else the seal is read when it is needed.
    """

    def __init__(self, storage: Storage, digest: str, index: PartIndex | None = None) -> None:
        self._storage, self.digest, self._given_index = storage, digest, index

    @property
    def path(self) -> str:
        return f"parts/{self.digest}"

    @cached_property
    def seal(self) -> dict[str, Any]:
        data = self._read("seal.json")
        if digest_bytes(data) != self.digest:
            raise DamageError(f"{self._where('seal.json')}: its digest is not the part's name; run `logitstore verify`")
        return json.loads(data)

    @property
    def kind(self) -> str:
        return self.seal["kind"]

    @property
    def content(self) -> str:
        return self.seal["content"]

    @cached_property
    def index(self) -> PartIndex:
        """What a reader must know of the arrays."""
        return self._given_index or index_of_seal(self.seal, self._where("seal.json"))

    def array_names(self) -> list[str]:
        return sorted(self.index)

    def array(self, name: str) -> np.ndarray:
        """All values of a dense array.

        Raises:
            DamageError: an object is missing, or is not the one that was sealed.
            StoreError: the part has no array of that name.
        """
        array, objects = self._indexed(name), self._objects_of(name)
        try:
            return decode_dense(array.metadata, objects)
        except DamageError as error:
            raise DamageError(f"{self._where(name)}: {error}; run `logitstore verify`") from error

    def sparse(self, name: str = "sparse") -> SparseRows:
        """A sparse array, ragged: straight from the shard, since its rectangle can be a hundred times larger."""
        metadata, objects = self._indexed(name).metadata, self._objects_of(name)
        try:
            if metadata["codecs"][0]["name"] == SPARSE_ROWS:
                rows = _decode_rows(metadata, objects)
            else:
                rows = SparseRows.from_rectangle(decode_dense(metadata, objects))
            return replace(rows, step_nats=float(metadata["attributes"].get("step_nats", DEFAULT_STEP_NATS)))
        except (DamageError, LookupError, ValueError) as error:
            raise DamageError(f"{self._where(name)}: {error}; run `logitstore verify`") from error

    def is_sparse(self, name: str) -> bool:
        return self._indexed(name).metadata.get("data_type") == "uint64"

    def attributes(self, name: str) -> dict[str, Any]:
        """Attributes of an array."""
        return dict(self._indexed(name).metadata["attributes"])

    def damage(self) -> list[str]:
        """Every fault of this part, one line each, naming the object; empty when all digests hold."""
        try:
            _, objects = self.index, sorted(self.seal["objects"].items())
        except (DamageError, StorageError) as error:
            return [str(error)]
        faults = []
        for name, described in objects:
            try:
                self._check_object(name, self._object(name, described["bytes"], described["digest"]))
                check_end(self._storage, f"{self.path}/{name}", described["bytes"])
            except (DamageError, StorageError) as error:
                faults.append(str(error))
        return faults or self._content_faults()

    def _check_object(self, name: str, data: memoryview) -> None:
        """What plain zarr reads of an array must be what the seal says of it."""
        array, _, key = name.partition("/")
        if key == "zarr.json" and not _is_json_of(data, self.index[array].metadata if array in self.index else None):
            raise DamageError(f"{self._where(name)}: says otherwise than the seal; run `logitstore verify`")

    def _content_faults(self) -> list[str]:
        try:
            found = content_digest(
                {n: self.sparse(n) if self.is_sparse(n) else self.array(n) for n in self.array_names()}
            )
        except DamageError as error:
            return [str(error)]
        if found != self.content:
            return [f"{self._where('')}: content {self.content[:16]} was sealed, {found[:16]} decoded"]
        return []

    def _indexed(self, array: str) -> IndexedArray:
        if array not in self.index:
            raise StoreError(f"{self._where('')}: has no array {array!r}; it has {', '.join(self.array_names())}")
        return self.index[array]

    def _objects_of(self, array: str) -> dict[str, memoryview]:
        listed = self._indexed(array).objects
        return {o.key: self._object(f"{array}/{o.key}", o.num_bytes, o.digest) for o in listed}

    def _object(self, name: str, num_bytes: int, digest: str) -> memoryview:
        return read_object(self._storage, f"{self.path}/{name}", num_bytes, digest)

    def _read(self, name: str) -> bytes:
        try:
            return self._storage.read(f"{self.path}/{name}")
        except FileNotFoundError as error:
            raise DamageError(f"{self._where(name)}: missing; run `logitstore verify`") from error

    def _where(self, name: str) -> str:
        return self._storage.child_url(f"{self.path}/{name}".rstrip("/"))


def _is_json_of(data: memoryview, expected: Any) -> bool:
    try:
        return json.loads(bytes(data)) == expected
    except ValueError:
        return False


def _decode_rows(metadata: Mapping[str, Any], objects: Mapping[str, memoryview]) -> SparseRows:
    (num_rows, width) = metadata["shape"]
    if num_rows == 0:
        return SparseRows.from_rectangle(np.empty((0, width), np.uint64))
    from logitstore.codecs.sparse_rows import decode_chunk

    return decode_chunk(objects["c/0/0"], num_rows, width)
