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
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.core.buffer import cpu
from zarr.storage import MemoryStore

from logitstore.codecs import SPARSE_ROWS
from logitstore.dense_arrays import decode_dense
from logitstore.digests import digest_arrays, digest_bytes
from logitstore.errors import DamageError, StorageError, StoreError
from logitstore.part_index import IndexedArray, PartIndex, index_of_seal
from logitstore.reading import read_object
from logitstore.sparse import DEFAULT_STEP_NATS, FILL, SparseRows
from logitstore.storage import Storage

FORMAT = 1
KINDS = ("text", "tokens", "signal", "alignment")
_CHUNK_VALUES = 1 << 16
_ZSTD_LEVEL = 5


@dataclass(frozen=True)
class ArrayToStore:
    """One array of a part to be.

    Attributes:
        values: of dtype bool, uint8, int32, int64, float32, or sparse rows.
        attributes: what it is (``columns``, ``unit``, ``error_nats``).
        steps: of float32 [T, S]: decimals of which the columns hold multiples, NaN and -inf only.
    """

    values: np.ndarray | SparseRows
    attributes: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[str, ...] | None = None


@dataclass(frozen=True)
class StagedPart:
    """A part in memory, ready for upload.

    Attributes:
        digest: its name.
        content: digest of its decoded values.
        objects: all objects but the seal, by their name within the part.
        seal: bytes of ``seal.json``.
    """

    digest: str
    content: str
    objects: dict[str, bytes]
    seal: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.seal) + sum(map(len, self.objects.values()))

    def array_bytes(self) -> dict[str, int]:
        """Stored bytes by array; what the group itself takes is under ``metadata``."""
        sizes = {"metadata": len(self.seal)}
        for name, data in self.objects.items():
            array = name.split("/")[0] if "/" in name else "metadata"
            sizes[array] = sizes.get(array, 0) + len(data)
        return sizes


def stage(
    kind: str, arrays: Mapping[str, ArrayToStore], attributes: Mapping[str, Any], *, portable: bool = False
) -> StagedPart:
    """Encode a part in memory.

    Args:
        kind: one of ``KINDS``.
        arrays: by name.
        attributes: of the group, for people; nothing reads them to decide.
        portable: use only codecs that every reader of Zarr v3 has, at several times the size. The content is the same.
    """
    store = MemoryStore()
    group = zarr.open_group(store, mode="w", attributes={"logitstore": {"format": FORMAT, "kind": kind, **attributes}})
    for name, array in arrays.items():
        if isinstance(array.values, SparseRows):
            if portable:
                _write_dense(group, name, array.values.rectangle(_width(array.values)), array.attributes)
            else:
                _write_sparse(store, group, name, array.values, array.attributes)
        elif array.steps is not None and not portable:
            _write_quantised(group, name, array.values, array.attributes, array.steps)
        else:
            _write_dense(group, name, array.values, array.attributes)
    objects = {name: buffer.to_bytes() for name, buffer in sorted(store._store_dict.items())}
    content = content_digest({name: array.values for name, array in arrays.items()})
    body = {
        "format": FORMAT,
        "kind": kind,
        "content": content,
        "arrays": {name: json.loads(objects[f"{name}/zarr.json"]) for name in arrays},
        "objects": {name: {"bytes": len(data), "digest": digest_bytes(data)} for name, data in objects.items()},
    }
    seal = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return StagedPart(digest_bytes(seal), content, objects, seal)


def upload(storage: Storage, part: StagedPart) -> None:
    """Put a staged part: the seal first, so that objects are never without it. Nothing refers to the part yet."""
    storage.write(f"parts/{part.digest}/seal.json", part.seal)
    for name, data in part.objects.items():
        storage.write(f"parts/{part.digest}/{name}", data)


def content_digest(arrays: Mapping[str, np.ndarray | SparseRows]) -> str:
    """Digest of decoded values; sparse rows count as their ragged form, so that a rectangle's width is no content."""
    flat: dict[str, np.ndarray] = {}
    for name, values in arrays.items():
        if isinstance(values, SparseRows):
            flat[f"{name}.counts"] = values.counts
            flat[f"{name}.entries"] = values.entries()
        else:
            flat[name] = values
    return digest_arrays(flat)


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
            except (DamageError, StorageError) as error:
                faults.append(str(error))
        return faults or self._content_faults()

    def _check_object(self, name: str, data: bytes) -> None:
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

    def _objects_of(self, array: str) -> dict[str, bytes]:
        listed = self._indexed(array).objects
        return {o.key: self._object(f"{array}/{o.key}", o.num_bytes, o.digest) for o in listed}

    def _object(self, name: str, num_bytes: int, digest: str) -> bytes:
        return read_object(self._storage, f"{self.path}/{name}", num_bytes, digest)

    def _read(self, name: str) -> bytes:
        try:
            return self._storage.read(f"{self.path}/{name}")
        except FileNotFoundError as error:
            raise DamageError(f"{self._where(name)}: missing; run `logitstore verify`") from error

    def _where(self, name: str) -> str:
        return self._storage.child_url(f"{self.path}/{name}".rstrip("/"))


def _is_json_of(data: bytes, expected: Any) -> bool:
    try:
        return json.loads(data) == expected
    except ValueError:
        return False


def _write_dense(group: zarr.Group, name: str, values: np.ndarray, attributes: Mapping[str, Any]) -> None:
    # Inner chunks of one column: a column compresses by itself and can be read by itself.
    rows = len(values)
    chunk_rows = max(1, min(rows, _CHUNK_VALUES))
    shard_rows = max(1, -(-rows // chunk_rows)) * chunk_rows
    group.create_array(
        name,
        data=values,
        chunks=(chunk_rows, *(1 for _ in values.shape[1:])),
        shards=(shard_rows, *values.shape[1:]),
        compressors=[ZstdCodec(level=_ZSTD_LEVEL), Crc32cCodec()],
        fill_value=_fill_of(values.dtype),
        attributes=dict(attributes),
        # Without this a shard of nothing but fill is not written, and a lost one would read as fill.
        config={"write_empty_chunks": True},
    )


def _write_sparse(
    store: MemoryStore, group: zarr.Group, name: str, rows: SparseRows, attributes: Mapping[str, Any]
) -> None:
    from logitstore.codecs.sparse_rows import SparseRowsCodec, encode_rows

    # One chunk: its model is learnt once for all rows, and readers of a few rows fetch their groups alone.
    shape = (rows.num_rows, _width(rows))
    group.create_array(
        name,
        shape=shape,
        dtype="uint64",
        chunks=(max(1, shape[0]), shape[1]),
        serializer=SparseRowsCodec(),
        compressors=None,
        fill_value=int(FILL),
        attributes=dict(attributes),
    )
    if rows.num_rows:
        store._store_dict[f"{name}/c/0/0"] = cpu.Buffer.from_bytes(encode_rows(rows))


def _write_quantised(
    group: zarr.Group, name: str, values: np.ndarray, attributes: Mapping[str, Any], steps: tuple[str, ...]
) -> None:
    from logitstore.codecs.quantised import QuantisedCodec

    group.create_array(
        name,
        data=values,
        chunks=(max(1, len(values)), values.shape[1]),
        serializer=QuantisedCodec(steps),
        compressors=None,
        fill_value=np.nan,
        attributes=dict(attributes),
        config={"write_empty_chunks": True},
    )


def _width(rows: SparseRows) -> int:
    return max(1, int(rows.counts.max(initial=0)))


def _fill_of(dtype: np.dtype) -> Any:
    if dtype == np.uint64:
        return int(FILL)
    return np.nan if dtype.kind == "f" else 0


def _decode_rows(metadata: Mapping[str, Any], objects: Mapping[str, bytes]) -> SparseRows:
    (num_rows, width) = metadata["shape"]
    if num_rows == 0:
        return SparseRows.from_rectangle(np.empty((0, width), np.uint64))
    from logitstore.codecs.sparse_rows import decode_chunk

    return decode_chunk(objects["c/0/0"], num_rows, width)
