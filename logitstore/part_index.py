"""The index of a part: what a reader must know of its arrays before it asks for their bytes.

It comes from the part's seal, or for a hundred parts at once from a page of the manifest (``index_pages``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from logitstore.errors import DamageError


@dataclass(frozen=True)
class IndexedObject:
    """A stored object of an array.

    Attributes:
        key: its name below the array's, such as ``c/0/0``.
        num_bytes: its size.
        digest: hex BLAKE3 of its bytes.
    """

    key: str
    num_bytes: int
    digest: str


@dataclass(frozen=True)
class IndexedArray:
    """An array of a part.

    Attributes:
        metadata: what its ``zarr.json`` says.
        objects: in the order of their keys.
    """

    metadata: Mapping[str, Any]
    objects: tuple[IndexedObject, ...]


PartIndex = Mapping[str, IndexedArray]
"""The arrays of a part by name."""


def index_of_seal(seal: Mapping[str, Any], where: str) -> PartIndex:
    """The index that a seal holds.

    Raises:
        DamageError: it holds none.
    """
    try:
        objects: dict[str, list[IndexedObject]] = {name: [] for name in seal["arrays"]}
        for path, described in sorted(seal["objects"].items()):
            array, _, key = path.partition("/")
            if key and key != "zarr.json":
                objects[array].append(IndexedObject(key, described["bytes"], described["digest"]))
        return {name: IndexedArray(seal["arrays"][name], tuple(listed)) for name, listed in objects.items()}
    except (LookupError, TypeError, AttributeError) as error:
        raise DamageError(f"{where}: no seal that this version can read ({error!r})") from error


def split_schema(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """What the parts of a column have in common, and what differs from part to part.

    Returns:
        The metadata without shapes, and three shapes one after the other: of the array, of a stored object, and of a
        chunk within one (zeros if objects are not sharded).
    """
    grid, codecs = metadata["chunk_grid"], list(metadata["codecs"])
    shape, inner = list(metadata["shape"]), [0] * len(metadata["shape"])
    if _is_sharded(codecs):
        inner = list(codecs[0]["configuration"]["chunk_shape"])
        codecs[0] = _with_chunk_shape(codecs[0], None)
    schema = {**metadata, "shape": None, "chunk_grid": _with_chunk_shape(grid, None), "codecs": codecs}
    return schema, [*shape, *grid["configuration"]["chunk_shape"], *inner]


def join_schema(schema: Mapping[str, Any], shapes: list[int]) -> dict[str, Any]:
    """The inverse of ``split_schema``."""
    size = len(shapes) // 3
    shape, outer, inner = (shapes[begin : begin + size] for begin in (0, size, 2 * size))
    codecs = list(schema["codecs"])
    if _is_sharded(codecs):
        codecs[0] = _with_chunk_shape(codecs[0], inner)
    return {**schema, "shape": shape, "chunk_grid": _with_chunk_shape(schema["chunk_grid"], outer), "codecs": codecs}


def _is_sharded(codecs: list[dict[str, Any]]) -> bool:
    return len(codecs) == 1 and codecs[0]["name"] == "sharding_indexed"


def _with_chunk_shape(described: Mapping[str, Any], shape: list[int] | None) -> dict[str, Any]:
    return {**described, "configuration": {**described["configuration"], "chunk_shape": shape}}
