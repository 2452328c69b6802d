"""Index pages: for some 256 blocks of a column, the stored objects of each part's arrays.

With a page a reader asks for data at once: no seal, no ``zarr.json``. A page is a Parquet object named by its digest, a
row an object. Where pages end depends on the digests of the blocks alone, so a change of a few blocks rewrites a few
pages, even when it moves all blocks after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from logitstore import tables
from logitstore.digests import DIGEST_BYTES, pack_digests
from logitstore.part_index import IndexedArray, IndexedObject, PartIndex, join_schema, split_schema

PAGE_BLOCKS = 256
_LONGEST_PAGE = 4 * PAGE_BLOCKS
_NO_OBJECT = IndexedObject("", 0, "00" * DIGEST_BYTES)

Schemas = Mapping[str, Mapping[str, Any]]
"""By array, its ``zarr.json`` less the shapes."""


def page_ends(packed_digests: np.ndarray) -> tuple[int, ...]:
    """Where pages end: after a block whose digest begins with a zero byte, or when a page grows too long.

    Args:
        packed_digests: uint8 [B, 32] of the plan's blocks.

    Returns:
        The block after the last one of each page.
    """
    ends, begin, num_blocks = [], 0, len(packed_digests)
    for end in (*(np.flatnonzero(packed_digests[:, 0] == 0) + 1).tolist(), num_blocks):
        while end - begin > _LONGEST_PAGE:
            begin += _LONGEST_PAGE
            ends.append(begin)
        if end > begin:
            begin = end
            ends.append(end)
    return tuple(ends)


def schemas_of(index: PartIndex) -> dict[str, Any]:
    return {name: split_schema(array.metadata)[0] for name, array in sorted(index.items())}


def write_page(indexes: Sequence[PartIndex | None], schemas: Schemas) -> bytes:
    """A page.

    Args:
        indexes: of the page's blocks in order; None where a block has no answer.
        schemas: of the column. What does not agree with them is kept beside the array.
    """
    rows: list[tuple[int, str, str, int, str, list[int], str | None]] = []
    for block, index in enumerate(indexes):
        for name, array in sorted((index or {}).items()):
            schema, sizes = split_schema(array.metadata)
            own = None if schema == schemas.get(name) else json.dumps(schema, sort_keys=True)
            # An array of no values may have no object; it is an array all the same.
            listed = array.objects or (_NO_OBJECT,)
            rows += [(block, name, o.key, o.num_bytes, o.digest, sizes, own) for o in listed]
    shapes = [row[5] for row in rows]
    columns = {
        "block": pa.array([row[0] for row in rows], pa.int32()),
        "array": pa.array([row[1] for row in rows], pa.string()),
        "key": pa.array([row[2] for row in rows], pa.string()),
        "num_bytes": pa.array([row[3] for row in rows], pa.int64()),
        "digest": tables.from_digests(pack_digests([row[4] for row in rows])),
        "shapes": pa.array(shapes, pa.list_(pa.int64())),
        "schema": pa.array([row[6] for row in rows], pa.string()),
    }
    return tables.write_table(columns, {"format": 1})


class IndexPage:
    """A page in memory; an index is made when one is asked for."""

    def __init__(self, data: bytes) -> None:
        """
        Raises:
            DamageError: ``data`` is no page.
        """
        self._table = tables.StoredTable(data).table()
        self._blocks = self._table.column("block").to_numpy()

    def index(self, block: int, schemas: Schemas) -> PartIndex:
        """Of a block, counted from the page's first; ``schemas`` are those of the column."""
        begin, end = np.searchsorted(self._blocks, [block, block + 1]).tolist()
        found: dict[str, IndexedArray] = {}
        for row in self._table.slice(begin, end - begin).to_pylist():
            name = row["array"]
            stored = IndexedObject(row["key"], row["num_bytes"], row["digest"].hex())
            if name in found:
                found[name] = IndexedArray(found[name].metadata, (*found[name].objects, stored))
                continue
            listed = () if stored == _NO_OBJECT else (stored,)
            schema = schemas[name] if row["schema"] is None else json.loads(row["schema"])
            found[name] = IndexedArray(join_schema(schema, row["shapes"]), listed)
        return found
