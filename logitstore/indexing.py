"""Making a manifest's index pages: from the pages of the version before, and the seals of parts that are new."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from logitstore import freeing
from logitstore.errors import DamageError
from logitstore.index_pages import IndexPage, Schemas, page_ends, schemas_of, write_page
from logitstore.manifest import Column, Manifest
from logitstore.part_index import PartIndex
from logitstore.parts import Part
from logitstore.storage import Storage, map_threads


@dataclass(frozen=True)
class PageStore:
    """Where pages are.

    Attributes:
        storage: of the parts.
        read: a page by its digest.
        write: stores the bytes of a page; returns its digest.
    """

    storage: Storage
    read: Callable[[str], IndexPage]
    write: Callable[[bytes], str]


def with_pages(pages: PageStore, manifest: Manifest, current: Manifest | None) -> Manifest:
    """The same manifest with its index pages, which are stored. A page that ``current`` has is not written again.

    Raises:
        FreedError: a part that ``current`` does not have is missing.
        DamageError: the seal of such a part is damaged, or a page of ``current``.
    """
    ends = page_ends(manifest.plan.blocks.packed_digests)
    columns = []
    for column in manifest.columns:
        previous = current.column(column.id) if current else None
        columns.append(_Indexer(pages, column, previous).indexed(ends))
    return replace(manifest, columns=tuple(columns))


class _Indexer:
    """Makes the pages of one column."""

    def __init__(self, pages: PageStore, column: Column, previous: Column | None) -> None:
        self._pages, self._column, self._previous = pages, column, previous
        self._known: dict[bytes, tuple[str, int]] | None = None
        self._schemas: Schemas = previous.schemas if previous else {}

    def indexed(self, ends: tuple[int, ...]) -> Column:
        known = dict(_digests_by_parts(self._previous)) if self._previous else {}
        found = []
        for begin, end in zip((0, *ends), ends, strict=False):
            key = self._column.cells.parts[begin:end].tobytes()
            found.append((end, known.get(key) or self._make(begin, end)))
        return replace(self._column, schemas=self._schemas, pages=tuple(found))

    def _make(self, begin: int, end: int) -> str:
        """The digest of a new page; empty for one without answers."""
        answered = self._column.cells.answered[begin:end]
        if not answered.any():
            return ""
        indexes = list(map_threads(self._index, range(begin, end)))
        self._schemas = self._schemas or schemas_of(next(index for index in indexes if index is not None))
        return self._pages.write(write_page(indexes, self._schemas))

    def _index(self, block: int) -> PartIndex | None:
        cells = self._column.cells
        if not cells.answered[block]:
            return None
        if (page := self._known_pages().get(cells.parts[block].tobytes())) is not None:
            return self._pages.read(page[0]).index(page[1], self._schemas)
        part = Part(self._pages.storage, cells.parts[block].tobytes().hex())
        try:
            return part.index
        except DamageError:
            freeing.refuse_freed(self._pages.storage, [part.digest])
            raise

    def _known_pages(self) -> dict[bytes, tuple[str, int]]:
        """By part, its page in the previous version and its place there; made when it is first needed."""
        if self._known is None:
            self._known = dict(_places_by_part(self._previous)) if self._previous else {}
        return self._known


def _digests_by_parts(column: Column) -> Iterator[tuple[bytes, str]]:
    begin = 0
    for end, digest in column.pages:
        yield column.cells.parts[begin:end].tobytes(), digest
        begin = end


def _places_by_part(column: Column) -> Iterator[tuple[bytes, tuple[str, int]]]:
    for block in column.cells.answered.nonzero()[0].tolist():
        if (place := column.page_of(block)) is not None:
            yield column.cells.parts[block].tobytes(), place
