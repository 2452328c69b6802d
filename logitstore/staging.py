"""Staging: a part is encoded and sealed in memory, so that its name is known before anything of it is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.core.buffer import cpu
from zarr.storage import MemoryStore

from logitstore.digests import digest_arrays, digest_bytes
from logitstore.sparse import FILL, SparseRows
from logitstore.storage import Storage, map_threads

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
    folder = f"parts/{part.digest}"
    storage.write(f"{folder}/seal.json", part.seal)
    for _ in map_threads(lambda item: storage.write(f"{folder}/{item[0]}", item[1]), part.objects.items()):
        pass  # an error is raised here


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
    from logitstore.codecs.row_encoder import encode_rows
    from logitstore.codecs.sparse_rows import SparseRowsCodec

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
