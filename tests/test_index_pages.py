"""Index pages: they give back what seals say, and a small change rewrites few of them."""

from __future__ import annotations

from dataclasses import replace
from uuid import uuid4

import numpy as np
import pytest
from counting import CountingStorage

from logitstore import index_pages
from logitstore.column_cells import Cell
from logitstore.digests import digest_bytes, pack_digests
from logitstore.errors import DamageError, FreedError
from logitstore.index_pages import IndexPage, page_ends, schemas_of, write_page
from logitstore.manifest import Column, Manifest
from logitstore.part_index import join_schema, split_schema
from logitstore.parts import Part
from logitstore.plan import Plan, PlanBlock, PlanSettings
from logitstore.sparse import SparseRows
from logitstore.staging import ArrayToStore, StagedPart, stage, upload
from logitstore.storage import open_storage
from logitstore.store import Store

TEMPLATE = {"kind": "signal", "signal": "made-up"}
NUM_BLOCKS = 30


def make_part(number: int, **attributes: object) -> StagedPart:
    """Arrays whose shapes differ from part to part."""
    rows = SparseRows.from_rectangle(np.arange((number + 1) * 3, dtype=np.uint64).reshape(-1, 3))
    arrays = {
        "sparse": ArrayToStore(rows),
        "rest": ArrayToStore(np.full((number + 1, 2), number, np.float32), {"columns": ["a", "b"], **attributes}),
        "scored": ArrayToStore(np.ones(number + 1, bool)),
    }
    return stage("signal", arrays, {})


@pytest.fixture
def storage():
    return open_storage(f"memory://{uuid4().hex}")


def stored_index(storage, part: StagedPart):
    upload(storage, part)
    return Part(storage, part.digest).index


# Pages


def test_page_gives_back_what_seals_say(storage):
    indexes = [stored_index(storage, make_part(number)) for number in (3, 70, 0)]
    schemas = schemas_of(indexes[0])
    page = IndexPage(write_page([indexes[0], None, *indexes[1:]], schemas))
    assert [page.index(block, schemas) for block in range(4)] == [indexes[0], {}, *indexes[1:]]


def test_page_keeps_a_schema_that_is_not_the_columns(storage):
    ours, other = (stored_index(storage, make_part(2, **extra)) for extra in ({}, {"theta": "0.5"}))
    schemas = schemas_of(ours)
    data = write_page([ours, other], schemas)
    assert [IndexPage(data).index(block, schemas) for block in range(2)] == [ours, other]
    assert b"theta" not in write_page([other, ours], schemas_of(other))


def test_page_keeps_arrays_without_objects_and_those_of_several(storage):
    index = stored_index(storage, make_part(4))
    rest = index["rest"]
    several = replace(rest, objects=tuple(replace(rest.objects[0], key=f"c/{n}/0", num_bytes=n + 1) for n in range(3)))
    odd = {**index, "rest": several, "scored": replace(index["scored"], objects=())}
    schemas = schemas_of(index)
    assert IndexPage(write_page([odd], schemas)).index(0, schemas) == odd


def test_page_of_nothing_reads_back():
    assert IndexPage(write_page([None, None], {})).index(1, {}) == {}


@pytest.mark.parametrize("damaged", [b"", b"PAR1", b"\0" * 100])
def test_damaged_page_is_refused(damaged):
    with pytest.raises(DamageError, match="not a readable table"):
        IndexPage(damaged)


def test_schemas_are_the_metadata_less_the_shapes(storage):
    small, large = (stored_index(storage, make_part(number)) for number in (1, 90))
    for name in small:
        schema, shapes = split_schema(small[name].metadata)
        assert split_schema(large[name].metadata)[0] == schema
        assert join_schema(schema, shapes) == small[name].metadata
        assert join_schema(schema, split_schema(large[name].metadata)[1]) == large[name].metadata


# Where pages end


def test_pages_end_where_digests_say_and_cover_every_block():
    packed = np.random.default_rng(0).integers(0, 256, (5000, 32), np.uint8)
    ends = page_ends(packed)
    assert ends[-1] == 5000
    assert list(ends) == sorted(set(ends))
    assert np.diff([0, *ends]).max() <= index_pages._LONGEST_PAGE
    assert 10 <= len(ends) <= 35  # about 5000 / 256
    moved = page_ends(np.concatenate([packed[:7], packed[100:101], packed[7:]]))
    assert len({end + 1 for end in ends} & set(moved)) >= len(ends) - 1


def test_long_pages_are_cut():
    packed = np.full((2500, 32), 7, np.uint8)
    assert page_ends(packed) == (1024, 2048, 2500)
    packed[1099, 0] = 0
    assert page_ends(packed) == (1024, 1100, 2124, 2500)
    assert page_ends(packed[:0]) == ()


# Publishing


def make_plan(digests: list[str]) -> Plan:
    return Plan(PlanSettings(4096, 0), (PlanBlock(digest, "train", 1, 5, (1,), (0,)) for digest in digests), ("a",))


class Published:
    """A dataset of made-up parts, in pages of a few blocks; every fifth block's digest ends a page."""

    def __init__(self) -> None:
        self.storage = CountingStorage(open_storage(f"memory://{uuid4().hex}"))
        self.store = Store.open_or_create(self.storage.url)
        self.store.storage = self.storage
        self.digests = [("00" if n % 5 == 4 else "11") + digest_bytes(b"%d" % n)[2:] for n in range(NUM_BLOCKS)]
        self.cells = {digest: self.upload(number) for number, digest in enumerate(self.digests)}

    def upload(self, number: int) -> Cell:
        part = make_part(number)
        upload(self.storage, part)
        return Cell(part.digest, part.content, {"num_rows": number})

    def publish(self) -> Manifest:
        plan = make_plan(self.digests)
        digest = self.store.put_plan(plan)
        column = Column(TEMPLATE, "t", [self.cells.get(block) for block in self.digests])
        self.storage.requests.clear()
        version = self.store.publish("d", lambda current: Manifest(digest, plan, (column,)))
        return version.manifest

    def written(self) -> int:
        return len(self.storage.names("write", "pages/"))

    def seals_read(self) -> int:
        return len([name for name in self.storage.names("read", "parts/") if name.endswith("seal.json")])


@pytest.fixture
def published():
    return Published()


def check_indexes(published: Published, manifest: Manifest) -> None:
    (column,) = Store.open(published.storage.url).dataset("d").manifest.columns
    assert column == manifest.columns[0]
    for block, digest in enumerate(published.digests):
        if digest in published.cells:
            part = published.store.column_part(column, block)
            assert part.index == Part(published.storage, part.digest).index


def test_first_version_writes_all_pages(published):
    manifest = published.publish()
    (column,) = manifest.columns
    assert [end for end, _ in column.pages] == [5, 10, 15, 20, 25, 30]
    assert published.written() == len(column.page_digests()) == 6
    assert published.seals_read() == NUM_BLOCKS
    check_indexes(published, manifest)


def test_change_of_one_block_rewrites_one_page(published):
    published.publish()
    published.cells[published.digests[12]] = published.upload(99)
    manifest = published.publish()
    assert (published.written(), published.seals_read(), len(published.storage.names("read", "pages/"))) == (1, 1, 1)
    check_indexes(published, manifest)


def test_inserted_block_rewrites_one_page_though_all_others_move(published):
    published.publish()
    published.digests.insert(2, "22" * 32)
    published.cells["22" * 32] = published.upload(77)
    manifest = published.publish()
    assert [end for end, _ in manifest.columns[0].pages] == [6, 11, 16, 21, 26, 31]
    assert (published.written(), published.seals_read(), len(published.storage.names("read", "pages/"))) == (1, 1, 1)
    check_indexes(published, manifest)


def test_filled_hole_and_dropped_block_rewrite_their_pages(published):
    hole = published.cells.pop(published.digests[7])
    published.publish()
    published.cells[published.digests[7]] = hole
    del published.digests[21]
    manifest = published.publish()
    assert (published.written(), published.seals_read()) == (2, 1)
    check_indexes(published, manifest)


def test_pages_without_answers_are_none(published):
    published.cells = {digest: published.cells[digest] for digest in published.digests[5:9]}
    manifest = published.publish()
    assert [bool(digest) for _, digest in manifest.columns[0].pages] == [False, True, False, False, False, False]
    assert published.written() == 1
    check_indexes(published, manifest)


def test_new_label_reads_and_writes_no_page(published):
    first = published.publish()
    published.storage.requests.clear()
    renamed = replace(first.columns[0], label="new")
    version = published.store.publish("d", lambda current: replace(first, columns=(renamed,)))
    assert version.number == 2
    assert published.storage.by_folder("read")["pages"] == published.written() == published.seals_read() == 0


def test_missing_part_is_not_published(published):
    published.cells[published.digests[3]] = Cell("ab" * 32, "cd" * 32)
    with pytest.raises(FreedError, match="ab" * 32):
        published.publish()
    assert published.store.datasets() == {}


def test_damaged_page_is_named(published):
    (column,) = published.publish().columns
    name = f"pages/{column.pages[0][1]}"
    published.storage.write(name, published.storage.read(name)[:-1])
    fresh = Store.open(published.storage.url)
    for _ in range(2):
        with pytest.raises(DamageError, match=name):
            fresh.column_part(column, 0)
    assert fresh.column_part(column, 5).array("scored").all()


def test_packed_digests_of_plans_name_pages():
    """The rule is about digests alone: the same blocks give the same pages in any plan."""
    digests = ["11" * 32, "00" * 32, "22" * 32]
    assert page_ends(pack_digests(digests)) == page_ends(make_plan(digests).blocks.packed_digests) == (2, 3)
